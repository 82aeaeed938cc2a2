"""What the user sees while a run is under way."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class TrainingProgress:
    """A live bar on a terminal; elsewhere about twenty plain lines a run. Ranks other than 0 show nothing."""

    def __init__(self, console: Console, name: str, steps: int, shown: bool) -> None:
        self.console, self.steps, self.shown = console, steps, shown
        self.live = shown and console.is_terminal
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not self.live,
        )
        self.task = self.bar.add_task(name, total=steps, figures="")

    def __enter__(self) -> "TrainingProgress":
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def update(self, step: int, loss: float, tokens_per_s: float, exposed_share: float) -> None:
        """Show the step just done (0-based)."""
        figures = f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  exposed {exposed_share:4.0%}"
        self.bar.update(self.task, completed=step + 1, figures=figures)
        due = (step + 1) % max(self.steps // 20, 1) == 0 or step == 0
        if self.shown and not self.live and due:
            self.console.print(f"step {step + 1:5d} of {self.steps}  {figures}", highlight=False)
