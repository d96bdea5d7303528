"""The governor: between micro-batches it pauses for heat, battery and time of day, and reports the paused time.

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
SLOW_READ_S = 10.0  # between two readings of battery and throttling: they change slowly, and vcgencmd is a process
LOG_S = 30.0  # between two lines of metrics
NAP_S = 0.2  # longest delay until a stop request is handled
SAME_S = 0.5  # stop requests within this time count as one
MIN_PAUSE_S = 0.05  # shorter pauses are accumulated: a sleep costs a wake-up
BATTERY_MARGIN = 5  # percent above the level at which a run resumes, so that it does not flap

# PI control of the duty cycle. Simulated on first-order models that rise by 25 to 100 °C above 10 to 40 °C with time
# constants of 20 to 600 s, and sensors 0 to 10 s late and rounded to 1 °C: it settles without oscillation, except where
# a single micro-batch heats by several degrees.
GAIN = 0.05  # duty cycle per °C
RESET_S = 100.0  # integral time: the integral term then equals the proportional one
FIRST = 0.6  # initial integral: the duty cycle falls from (1 - FIRST) / GAIN = 8 °C below the target
MIN_DUTY = 0.05  # lowest duty cycle; `limit_celsius` handles the rest
MAX_READING_S = 30.0  # longest time that one reading counts for: not a pause of hours


class Pace:
    """PI controller: temperature at the end of a micro-batch → duty cycle."""

    def __init__(self, target: float) -> None:
        self.target, self.share, self._integral = target, 1.0, FIRST

    def update(self, celsius: float, seconds: float) -> float:
        """seconds: since the last reading."""
        error = self.target - celsius
        output = self._integral + GAIN * error
        if MIN_DUTY < output < 1 or (output >= 1) != (error > 0):  # anti-windup: held when saturated
            integral = self._integral + GAIN / RESET_S * error * min(seconds, MAX_READING_S)
            self._integral = min(1.0, max(0.0, integral))
        self.share = min(1.0, max(MIN_DUTY, self._integral + GAIN * error))
        return self.share


class Governor:
    """The pauses of one process; a stop request ends them."""

    def __init__(
        self,
        run: Run,
        progress: Progress,
        stop_requested: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        local: Callable[[], time.struct_time] = time.localtime,
    ) -> None:
        self.run, self.progress, self.stop_requested = run, progress, stop_requested
        self.config = run.recipe.governor
        self.windows = windows(self.config.schedule)
        self._clock, self._sleep, self._local = clock, sleep, local
        self.sensors = Sensors(sensors.root(), self.config.sensors)
        self.pace = Pace(self.config.target_celsius)
        self.paused_s: dict[str, float] = defaultdict(float)  # by reason, in this process
        self.inside_s = 0.0  # spent in `pause_if_needed`
        self.own_s = 0.0  # of these, neither pauses nor checkpoints before them
        self.throttled: list[str] = []  # reasons, in the order of their detection
        self.celsius: float | None = None
        self.percent: float | None = None  # of the battery
        self._drained = False
        self._waiting = ""  # reason of the present pause
        self._slowed = False  # reported
        self._debt = 0.0  # seconds of pauses not yet taken
        self._logged_s: dict[str, float] = {}
        self._returned = clock()
        self._read = self._slow_read = self._logged = float("-inf")

    def pause_if_needed(self, save: Callable[[], None] = lambda: None) -> bool:
        """Pauses if necessary, and saves before a long pause; True: stop requested."""
        begin, self._not_own_s = self._clock(), 0.0
        worked = begin - self._returned
        if begin - self._read >= READ_S:
            self._read_sensors(begin)
        if (why := self._reason()) and not self.stop_requested():
            self._wait(why, save)
        elif self.pace.share < 1:
            self._debt += worked * (1 / self.pace.share - 1)
            if self._debt >= MIN_PAUSE_S:
                self._pause("heat", self._debt)
                self._debt = 0.0
        self._log()
        self._returned = self._clock()
        self.inside_s += self._returned - begin
        self.own_s += self._returned - begin - self._not_own_s
        return self.stop_requested()

    def _read_sensors(self, now: float) -> None:
        since = now - self._read
        self._read = now
        self.celsius = self.sensors.celsius()
        if self.celsius is not None and self.config.target_celsius and not self._waiting:
            share = self.pace.update(self.celsius, since)
            if share < 1 and not self._slowed:
                self._slowed = True
                self.progress.line(f"slowing down to stay at {self.config.target_celsius:g} °C")
        if now - self._slow_read >= SLOW_READ_S:
            self._slow_read = now
            self.percent, self._drained = self.sensors.battery()
            for why in self.sensors.throttling.seen():
                if why not in self.throttled:
                    self.throttled.append(why)
                    self.progress.line(f"the system throttles this machine: {why}")

    def _reason(self) -> str:
        """Why the run must pause now, or ""; with hysteresis if it already pauses for this reason."""
        c, present = self.config, self._waiting
        now = self._local()
        if self.windows and not any(_inside(60 * now.tm_hour + now.tm_min, *window) for window in self.windows):
            return "schedule"
        if c.battery_percent and self._drained and self.percent is not None:
            level = c.battery_percent + (BATTERY_MARGIN if present == "battery" else 0)
            if self.percent < level or c.battery_percent == 100:
                return "battery"
        if c.limit_celsius and self.celsius is not None:
            low = c.limit_celsius - c.hysteresis_celsius
            if self.celsius >= c.limit_celsius or (present == "heat" and self.celsius > low):
                return "heat"
        return ""

    def _wait(self, why: str, save: Callable[[], None]) -> None:
        """Until there is no reason left; the reason may change meanwhile."""
        began = self._clock()
        save()
        self._not_own_s += self._clock() - began
        while why and not self.stop_requested():
            self._waiting = why
            self.progress.pause(f"pausing: {self._describe(why)}")
            self._log(now=True)
            began = self._clock()
            while self._reason() == why and not self.stop_requested():
                self._pause(why, READ_S)
                self._read_sensors(self._clock())
                self._log()
            outcome = "stopping" if self.stop_requested() else "resuming"
            self.progress.resume(f"after {self._clock() - began:.0f} s: {outcome}")
            why = self._reason()
        self._waiting, self._debt = "", 0.0
        self._log(now=True)

    def _describe(self, why: str) -> str:
        if why == "heat":
            low = self.config.limit_celsius - self.config.hysteresis_celsius
            return f"{self.celsius:.0f} °C is too hot; it resumes at {low:g} °C"
        if why == "battery":
            level = self.config.battery_percent
            until = "it is charged" if level == 100 else f"it is charged or above {level + BATTERY_MARGIN} %"
            return f"the battery is discharging, at {self.percent:.0f} %; it resumes when {until}"
        return f"it runs only {self.config.schedule}"

    def _pause(self, why: str, seconds: float) -> None:
        began = now = self._clock()
        while now < began + seconds and not self.stop_requested():
            self._sleep(min(NAP_S, began + seconds - now))
            now = self._clock()
        self.paused_s[why] += now - began
        self.run.paused_s += now - began
        self._not_own_s += now - began

    def worked_s(self) -> float:
        """A clock that stops during `pause_if_needed`."""
        return self._clock() - self.inside_s

    def _log(self, now: bool = False) -> None:
        """A line of metrics every LOG_S: sensors, and the paused time since the last line."""
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
        """Pauses of all processes of this run; the governor's own time in this one."""
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
    """Also across midnight."""
    return begin <= minute < end if begin < end else minute >= begin or minute < end


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM request a stop, and the loop stops at the next safe point. A second Ctrl-C interrupts at once.

    Signals within SAME_S are one request: this process and its parent both got it.
    """
    times: list[float] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        now = time.monotonic()
        if times and number == signal.SIGINT and now - times[0] > SAME_S:
            raise KeyboardInterrupt
        times.append(now)

    try:
        for number in stop_signals():
            before[number] = signal.signal(number, note)
    except ValueError:  # not the main thread: signals are the caller's
        pass
    try:
        yield lambda: bool(times)
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
