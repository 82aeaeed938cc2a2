"""What the house promises beyond the import contract."""

import ast
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "brigata"


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_models_know_nothing_of_parallelism() -> None:
    for path in [*(SOURCE / "model").glob("*.py"), *(SOURCE / "ops").glob("*.py")]:
        assert not {name for name in imports(path) if name.startswith("torch.distributed")}, path.name


def test_no_source_file_outgrows_its_idea() -> None:
    sizes = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    assert not {name: size for name, size in sizes.items() if size > 500}


def test_help_and_checks_do_not_import_torch() -> None:
    code = "import sys, brigata.cli, brigata.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_that_a_cpu_reaches_names_cuda() -> None:
    for path in SOURCE.rglob("*.py"):
        assert "torch.cuda" not in path.read_text(encoding="utf-8"), path.name
