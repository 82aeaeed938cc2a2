"""A job is read or refused in sentences that name the setting, its value and what would work."""

import json
from pathlib import Path

import pytest

from brigata.describe import JobError, ModelSpec, count_parameters, load_job, parse_order
from brigata.describe.order import ORDERS
from brigata.describe.template import job_schema, job_template

DEMO = Path(__file__).parents[1] / "jobs" / "demo.toml"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("layout.tpp=2", "layout.tpp is not a setting; did you mean layout.tp?"),
        ("nonsense=1", "nonsense is not a setting; known here: cluster, layout"),
        ("model.experts.topk=1", "model.experts.topk is not a setting; did you mean model.experts.top_k?"),
        ("model.mamba={heads = 4, foo = 2}", "model.mamba.foo is not a setting; known here: bias, chunk"),
        ("model.rope_scaling={kind = 'yarn'}", "model.rope_scaling.original_length is missing"),
        ("model.experts={count = 4, top_k = 9, ffn = 8}", "use 4 or less"),
        ("layout.tp=3", "layout.tp = 3 does not divide model.heads = 8; use 1, 2, 4 or 8"),
        ("model.kv_heads=3", "model.kv_heads = 3 does not divide model.heads = 8; use 1, 2, 4 or 8"),
        ("model.heads=x", "model.heads = 'x' is refused: input should be a valid integer"),
        ("model.pattern=*M", "[model.mamba] is missing; add it"),
        ("model.pattern=*?", "model.pattern has the letter '?', which names no unit"),
        ("model.preset=gpt5", "model.preset = 'gpt5' is not known; use gpt2, gpt2-medium"),
        ("model.vocab=100", "model.vocab = 100 cannot hold the 256 tokens"),
        ("layout.overlap=foo", "layout.overlap = 'foo' is no order; use blocking"),
        ("layout.overlap=sliced", "layout.overlap = 'sliced' needs a number of slices; use sliced:4"),
        ("layout.overlap=ring:0", "layout.overlap = 'ring:0' needs a whole number of parts from 1 to 64"),
        ("layout.overlap=blocking:2", "layout.overlap = 'blocking:2' has no parts; use blocking"),
        ("layout.overlap=async_tp:2", "layout.overlap = 'async_tp:2' has no parts; use async_tp"),
        (
            "layout.overlap=direct:2:2",
            "layout.overlap = 'direct:2:2' needs a whole number of parts from 1 to 64",
        ),
        (
            "layout.overlap=bidirectional:3",
            "needs an even number of parts, half of them either way; use bidirectional:4",
        ),
        (
            "layout.overlap=hierarchical",
            "needs the number of ranks a node, from 1 to 4096; use hierarchical:8",
        ),
        (
            "layout.overlap=hierarchical:x",
            "needs the number of ranks a node, from 1 to 4096; use hierarchical:8",
        ),
        (
            "layout.overlap=hierarchical:4:0",
            "needs a whole number of parts from 1 to 64; use hierarchical:4:2",
        ),
        ("layout.overlap=ring:2@bf16", "can send sums as they are or in fp32; use ring:2 or ring:2@fp32"),
        ("layout.overlap=ring@", "can send sums as they are or in fp32; use ring or ring@fp32"),
        (
            "layout.overlap=blocking@fp32",
            "leaves the dtype of its messages to the backend; use blocking or blocking_p2p@fp32",
        ),
        ("layout.overlap=hierarchical:3", "layout.overlap = 'hierarchical:3': 3 ranks a node do not divide"),
        ("layout.zero=0", "layout.zero = 0 is planned only; use layout.zero = 1"),
        ("layout.cp=2", "layout.cp = 2: context parallelism does not run yet; use 1"),
        ("layout.pp=2", "layout.pp = 2: pipeline parallelism does not run yet; use 1"),
        ("layout.dp_replicate=2", "layout.dp_replicate = 2 does not divide layout.dp = 1; use 1"),
        ("cluster.devices=3", "cluster.devices = 3 is no multiple of tp * cp * pp = 2; use 2, 4 or 8"),
        ("layout.dp=3", "workload.global_batch = "),
        ("workload.micro_batch=3", "workload.micro_batch = 3 does not divide the"),
        ("workload.seq_len=255", "layout.tp = 2 does not divide workload.seq_len = 255; use 256 tokens"),
        ("train.data=nowhere", "train.data = 'nowhere' is not there; name an existing folder or text file"),
        ("train.precision=int8", "train.precision = 'int8' is refused"),
        ("train.warmup=99999", "train.warmup = 99999 is more than train.steps"),
        ("train.trace_steps=[7, 5]", "train.trace_steps = [7, 5] is no range of steps from 0 to"),
        ("layout=auto", "layout = 'auto' needs the planner"),
        ("version=2", "version = 2 is refused: input should be 1"),
        ("name=../x", "name = '../x' is refused"),
        ("layout.tp", "--set 'layout.tp' is not understood; write --set section.key=value"),
    ],
)
def test_refusals_name_setting_value_and_way_out(override: str, sentence: str) -> None:
    with pytest.raises(JobError) as refusal:
        load_job(DEMO, [override])
    assert sentence in str(refusal.value)


def test_one_mistake_is_one_sentence() -> None:
    with pytest.raises(JobError) as refusal:
        load_job(DEMO, ["model.heads=x"])
    assert len(refusal.value.refusals) == 1


def test_empty_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    for name, sentence in [("empty.txt", "is empty"), ("folder", "holds no file")]:
        with pytest.raises(JobError, match=sentence):
            load_job(DEMO, [f"train.data={tmp_path / name}"])


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="brigata init"):
        load_job(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("version = ")
    with pytest.raises(JobError, match="not valid TOML"):
        load_job(tmp_path / "broken.toml")
    (tmp_path / "bare.toml").write_text("version = 1\n")
    with pytest.raises(JobError, match=r"\[layout\] is missing"):
        load_job(tmp_path / "bare.toml")


def test_data_parallel_ranks_fill_the_devices() -> None:
    job = load_job(DEMO, ["cluster.devices=8"])
    assert (job.dp, job.ranks) == (4, 8)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("smollm2-135m", 134_515_008), ("llama3-8b", 8_030_261_248), ("llama3.2-1b", 1_235_814_400)],
)
def test_presets_have_their_published_size(preset: str, parameters: int) -> None:
    assert count_parameters(ModelSpec.model_validate({"preset": preset})) == parameters


def test_the_template_is_a_job_that_runs(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(job_template("mine", "job.schema.json"))
    assert load_job(path).name == "mine"


def test_the_schema_knows_every_section() -> None:
    schema = json.loads(job_schema())
    assert {"model", "cluster", "workload", "layout", "train"} <= schema["properties"].keys()
    assert "description" in schema["$defs"]["Layout"]["properties"]["tp"]


def test_auto_is_an_overlap_but_no_order() -> None:
    assert load_job(DEMO, ["layout.overlap=auto"]).layout.overlap == "auto"
    with pytest.raises(ValueError, match="is no order"):
        parse_order("auto")


@pytest.mark.parametrize(
    "name",
    ["blocking", "sliced:4", "ring", "direct:3", "bidirectional", "bidirectional:4", "hierarchical:8",
     "hierarchical:8:2", "userbuffers", "async_tp", "ring@fp32", "direct:2@fp32", "hierarchical:8:2@fp32"],
)  # fmt: skip
def test_orders_read_back_as_written(name: str) -> None:
    assert str(parse_order(name)) == name


def test_every_order_is_described_and_knows_whether_it_overlaps() -> None:
    examples = {"sliced": "sliced:2", "hierarchical": "hierarchical:2"}
    parsed = {kind: parse_order(examples.get(kind, kind)) for kind in ORDERS}
    assert [kind for kind, order in parsed.items() if not order.overlapped] == ["blocking", "blocking_p2p"]
    assert (parsed["bidirectional"].parts, parsed["hierarchical"].node, parsed["ring"].wire) == (2, 2, "")
    assert parse_order("ring:2@fp32").wire == "fp32"
