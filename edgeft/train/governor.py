"""The governor: between micro-batches it pauses for heat, battery and times of day, and says what that cost.

It decides only when the next micro-batch begins, never what is in it: a run with pauses ends with the same bits.
"""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from edgeft.config import windows
from edgeft.host import sensors
from edgeft.host.sensors import Sensors
from edgeft.host.system import stop_signals
from edgeft.run.events import PauseEvent, read_events
from edgeft.run.folder import Run
from edgeft.run.progress import Progress

READ_S = 1.0  # between two readings of the temperature
LOOK_S = 10.0  # between two looks at battery and throttling: they change slowly, and vcgencmd is a process
LOG_S = 30.0  # between two lines of metrics
NAP_S = 0.2  # a request to stop is heard within this time
SAME_S = 0.5  # requests to stop within this time are one
LEAST_PAUSE_S = 0.05  # shorter ones are saved up: a sleep costs a wake-up
BATTERY_MARGIN = 5  # percent above the level at which a run goes on: else a battery near it would stop and start it

# PI control of the share of the time that is worked. Tried on first-order models that rise by 25 to 100 °C above 10 to
# 40 °C with time constants of 20 to 600 s, and sensors 0 to 10 s late and rounded to 1 °C: it settles without swinging,
# but where a micro-batch alone heats by several degrees.
GAIN = 0.05  # share of the time per °C
RESET_S = 100.0  # the integral does in this time what the gain did at once
FIRST = 0.6  # the integral at the start: work is shortened (1 - FIRST) / GAIN = 8 °C below the target
LEAST = 0.05  # share that is worked at the least, and the limit takes care of the rest
LONGEST_S = 30.0  # what the integral takes one reading to stand for: not a pause of hours


class Pace:
    """From temperatures at the ends of micro-batches to the share of the time that may be worked."""

    def __init__(self, target: float) -> None:
        self.target, self.share, self._integral = target, 1.0, FIRST

    def update(self, celsius: float, seconds: float) -> float:
        """seconds: since the last reading."""
        error = self.target - celsius
        wanted = self._integral + GAIN * error
        if LEAST < wanted < 1 or (wanted >= 1) != (error > 0):  # at its ends it is held, so that it does not wind up
            moved = self._integral + GAIN / RESET_S * error * min(seconds, LONGEST_S)
            self._integral = min(1.0, max(0.0, moved))
        self.share = min(1.0, max(LEAST, self._integral + GAIN * error))
        return self.share


class Governor:
    """One process's pauses. `asked` says whether the run shall stop: no pause outlasts that."""

    def __init__(
        self,
        run: Run,
        progress: Progress,
        asked: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        local: Callable[[], time.struct_time] = time.localtime,
    ) -> None:
        self.run, self.progress, self.asked = run, progress, asked
        self.config = run.recipe.governor
        self.windows = windows(self.config.schedule)
        self._clock, self._sleep, self._local = clock, sleep, local
        self.sensors = Sensors(sensors.root(), self.config.sensors)
        self.pace = Pace(self.config.target_celsius)
        self.paused_s: dict[str, float] = defaultdict(float)  # by reason, in this process
        self.inside_s = 0.0  # spent in `between`, whatever for
        self.own_s = 0.0  # of these, the governor's own: neither a pause nor a checkpoint before one
        self.throttled: list[str] = []  # reasons, in the order they were seen
        self.celsius: float | None = None
        self.percent: float | None = None  # of the battery
        self._drained = False
        self._waiting = ""  # the reason of the pause that lasts
        self._slowed = False  # and has it been said?
        self._debt = 0.0  # seconds of pausing that are still to be taken
        self._logged_s: dict[str, float] = {}
        self._left = clock()
        self._read = self._looked = self._logged = float("-inf")

    def pause_if_needed(self, save: Callable[[], None] = lambda: None) -> bool:
        """Pauses if it must, and before a long pause saves; True: asked to stop."""
        came, self._not_own_s = self._clock(), 0.0
        worked = came - self._left
        if came - self._read >= READ_S:
            self._take(came)
        if (why := self._reason()) and not self.asked():
            self._wait(why, save)
        elif self.pace.share < 1:
            self._debt += worked * (1 / self.pace.share - 1)
            if self._debt >= LEAST_PAUSE_S:
                self._pause("heat", self._debt)
                self._debt = 0.0
        self._log()
        self._left = self._clock()
        self.inside_s += self._left - came
        self.own_s += self._left - came - self._not_own_s
        return self.asked()

    def _take(self, now: float) -> None:
        since = now - self._read
        self._read = now
        self.celsius = self.sensors.celsius()
        if self.celsius is not None and self.config.target_celsius and not self._waiting:
            share = self.pace.update(self.celsius, since)
            if share < 1 and not self._slowed:
                self._slowed = True
                self.progress.line(f"slowing down, to settle at {self.config.target_celsius:g} °C")
        if now - self._looked >= LOOK_S:
            self._looked = now
            self.percent, self._drained = self.sensors.battery()
            for why in self.sensors.throttling.seen():
                if why not in self.throttled:
                    self.throttled.append(why)
                    self.progress.line(f"this machine is slowed down by its system: {why}")

    def _reason(self) -> str:
        """Why work may not go on now; with hysteresis, if a pause for this reason lasts already."""
        c, late = self.config, self._waiting
        now = self._local()
        if self.windows and not any(_inside(60 * now.tm_hour + now.tm_min, *window) for window in self.windows):
            return "schedule"
        if c.battery_percent and self._drained and self.percent is not None:
            level = c.battery_percent + (BATTERY_MARGIN if late == "battery" else 0)
            if self.percent < level or c.battery_percent == 100:
                return "battery"
        if c.limit_celsius and self.celsius is not None:
            low = c.limit_celsius - c.hysteresis_celsius
            if self.celsius >= c.limit_celsius or (late == "heat" and self.celsius > low):
                return "heat"
        return ""

    def _wait(self, why: str, save: Callable[[], None]) -> None:
        """Until nothing speaks against going on; the reason may change on the way."""
        began = self._clock()
        save()
        self._not_own_s += self._clock() - began
        while why and not self.asked():
            self._waiting = why
            self.progress.pause(f"pausing: {self._told(why)}")
            self._log(now=True)
            began = self._clock()
            while self._reason() == why and not self.asked():
                self._pause(why, READ_S)
                self._take(self._clock())
                self._log()
            self.progress.go_on(f"after {self._clock() - began:.0f} s: {'stopping' if self.asked() else 'going on'}")
            why = self._reason()
        self._waiting, self._debt = "", 0.0
        self._log(now=True)

    def _told(self, why: str) -> str:
        if why == "heat":
            low = self.config.limit_celsius - self.config.hysteresis_celsius
            return f"{self.celsius:.0f} °C is too hot; it goes on at {low:g} °C"
        if why == "battery":
            level = self.config.battery_percent
            until = "it is charged" if level == 100 else f"it is charged or above {level + BATTERY_MARGIN} %"
            return f"the battery is being drained, at {self.percent:.0f} %; it goes on when {until}"
        return f"it works only {self.config.schedule}"

    def _pause(self, why: str, seconds: float) -> None:
        began = now = self._clock()
        while now < began + seconds and not self.asked():
            self._sleep(min(NAP_S, began + seconds - now))
            now = self._clock()
        self.paused_s[why] += now - began
        self.run.paused_s += now - began
        self._not_own_s += now - began

    def worked_s(self) -> float:
        """A clock that stands still in `between`."""
        return self._clock() - self.inside_s

    def _log(self, now: bool = False) -> None:
        """One line of metrics now and then: how warm it is, and what was lost since the last line."""
        at = self._clock()
        if not now and at - self._logged < LOG_S:
            return
        before = self._logged_s
        lost = {why: round(s - before.get(why, 0.0), 3) for why, s in self.paused_s.items() if s > before.get(why, 0.0)}
        if lost or self.throttled or self._waiting or self.celsius is not None or self.percent is not None:
            share = round(self.pace.share, 3) if self.pace.share < 1 else None
            self.run.log(
                PauseEvent(lost, list(self.throttled), self.celsius, self.percent, self._waiting or None, share)
            )
        self._logged, self._logged_s = at, dict(self.paused_s)

    @property
    def note(self) -> str:
        """For the progress line."""
        warm = "" if self.celsius is None else f" · {self.celsius:.0f} °C"
        return warm if self.pace.share == 1 else f"{warm}, slowed to {self.pace.share:.0%}"

    def totals(self) -> dict[str, object]:
        """Pauses of all processes of this run; the governor's own seconds of this one."""
        self._log(now=True)
        events = read_events(PauseEvent, self.run.events())
        lost: dict[str, float] = defaultdict(float)
        for event in events:
            for why, seconds in event.paused_s.items():
                lost[why] += seconds
        throttled = dict.fromkeys(why for event in events for why in event.throttled)
        return {
            "paused_s": {why: round(seconds, 2) for why, seconds in lost.items()},
            "throttled": list(throttled),
            "governor_s": round(self.own_s, 3),
        }


def _inside(minute: int, begin: int, end: int) -> bool:
    """Over midnight, too."""
    return begin <= minute < end if begin < end else minute >= begin or minute < end


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask; the loop answers at the next safe place. A second Ctrl-C is not held back.

    One that comes along with another signal is no second one: this process and its parent were both told.
    """
    asked: list[float] = []  # when
    before: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        now = time.monotonic()
        if asked and number == signal.SIGINT and now - asked[0] > SAME_S:
            raise KeyboardInterrupt
        asked.append(now)

    try:
        for number in stop_signals():
            before[number] = signal.signal(number, note)
    except ValueError:  # not the main thread: the caller stops us in its own way
        pass
    try:
        yield lambda: bool(asked)
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
