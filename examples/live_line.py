"""One line that shows how far a run is, on a terminal. Where output goes to a file there is none,
and all else is printed alike.
"""

import atexit

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn


class LiveLine:
    """The line: phase, step, of how many, numbers, and the time that is left; what is printed goes
    above it.
    """

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console()
        bar, count, left = BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn(compact=True)
        columns = ("{task.description}", bar, count, "{task.fields[shown]}", left, "left")
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        # A run that ends in the middle gives the cursor back.
        atexit.register(self.close)
        self._phase, self._task = "", self._progress.add_task("", visible=False, shown="")

    def show(self, phase: str, step: int, total: int, shown: str) -> None:
        """Show that a step is done."""
        if phase != self._phase:  # a resumed run begins with a later step
            self._progress.remove_task(self._task)
            self._task = self._progress.add_task(phase, total=total, completed=step - 1, shown="")
            self._phase = phase
            self._progress.start()
        self._progress.update(self._task, completed=step, shown=shown)

    def close(self) -> None:
        """Leave the line as it is."""
        self._progress.stop()


def shown_numbers(metrics: dict[str, float], seconds: float) -> str:
    """Reward or loss, and tokens a second, of a step's metrics."""
    name = "reward" if "reward" in metrics else "loss"
    shown = [f"{name} {metrics[name]:z.3f}"] if name in metrics else []
    if "num_tokens" in metrics and seconds > 0:
        shown.append(f"{metrics['num_tokens'] / seconds:,.0f} tokens/s")
    return " · ".join(shown)
