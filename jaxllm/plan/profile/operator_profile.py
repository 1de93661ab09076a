"""Operator profile: measured seconds of operators on a kind of devices, kept in a JSON file.

Times of passes are by their exact shapes. Those of collectives are by a ladder of sizes, and linear in bytes between
two of them, as vTrain interpolates its measured all-reduces (arXiv:2312.12391, section III-C).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.files import DataError, write_json
from jaxllm.plan.profile.operators import CollectiveOperator, Operator

VERSION = 1
LOWEST, FACTOR = 1024, 4
"""Bytes of the ladder's lowest rung, and what each is over the one below."""


class ProfileDevices(NamedTuple):
    """Devices and software that times hold for.

    Attributes:
        platform, kind: of the devices.
        jax: version.
        processors: processor of each device, -1 where it has one or more of its own; equal where devices share one.
    """

    platform: str
    kind: str
    jax: str
    processors: tuple[int, ...]


class MissingOperators(DataError):
    """Operators that a profile has no time of.

    Attributes:
        operators: the operators.
    """

    def __init__(self, operators: Iterable[Operator], where: str):
        self.operators = tuple(dict.fromkeys(operators))
        named = "\n  ".join(operator.key for operator in self.operators[:8])
        more = f"\n  and {len(self.operators) - 8} more" if len(self.operators) > 8 else ""
        super().__init__(
            f"{where} has no time of {len(self.operators)} operators of this layout:\n  {named}{more}\nMeasure them on "
            "such devices with `jaxllm bench RECIPE --operators FILE`, with the same settings as here; what the file "
            "has is not measured again."
        )


@dataclass(frozen=True)
class OperatorProfile:
    """Operator profile.

    Attributes:
        devices: what was measured on.
        seconds: by ``Operator.key``.
        dates: day of each measurement, by key.
        name: of the file, for messages.
    """

    devices: ProfileDevices
    seconds: dict[str, float] = field(default_factory=dict)
    dates: dict[str, str] = field(default_factory=dict)
    name: str = "the profile"

    def time(self, operator: Operator) -> float:
        """Seconds of an operator.

        Raises:
            MissingOperators: there is no time of it.
        """
        if missing := self.missing([operator]):
            raise MissingOperators(missing, self.name)
        if not isinstance(operator, CollectiveOperator):
            return self.seconds[operator.key]
        low, high = rungs(operator)
        below, above = self.seconds[low.key], self.seconds[high.key]
        if low == high:
            return below
        return below + (above - below) * (operator.bytes - low.bytes) / (high.bytes - low.bytes)

    def missing(self, operators: Iterable[Operator]) -> list[Operator]:
        """Operators to measure before the given ones have times."""
        return [one for one in measured_for(operators) if one.key not in self.seconds]

    def with_times(self, found: dict[str, float], date: str) -> OperatorProfile:
        """The profile with further times."""
        return replace(self, seconds=self.seconds | found, dates=self.dates | dict.fromkeys(found, date))

    def write(self, path: Path) -> None:
        """Writes the file."""
        rows = {key: {"seconds": self.seconds[key], "date": self.dates[key]} for key in sorted(self.seconds)}
        write_json(path, {"version": VERSION, "devices": self.devices._asdict(), "operators": rows})


def rungs(operator: CollectiveOperator) -> tuple[CollectiveOperator, CollectiveOperator]:
    """Measured sizes between which a collective's size lies; one and the same below the lowest and on a rung."""
    high = LOWEST
    while high < operator.bytes:
        high *= FACTOR
    low = high if operator.bytes in (high, min(operator.bytes, LOWEST)) else high // FACTOR
    return replace(operator, bytes=low), replace(operator, bytes=high)


def measured_for(operators: Iterable[Operator]) -> list[Operator]:
    """Operators that are measured to have times of the given ones: rungs of the ladder in place of collectives."""
    found = [
        one
        for operator in operators
        for one in (rungs(operator) if isinstance(operator, CollectiveOperator) else (operator,))
    ]
    return list({one.key: one for one in found}.values())


def read_profile(path: Path) -> OperatorProfile:
    """Reads a profile.

    Raises:
        DataError: the file is none, or of another version.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        version = found["version"]
        kind = ProfileDevices(**found["devices"])
        rows = {key: (float(row["seconds"]), str(row["date"])) for key, row in found["operators"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no operator profile ({error!r}): give a file that `jaxllm bench RECIPE --operators FILE` wrote."
        ) from None
    if version != VERSION:
        raise DataError(f"{path} has version {version} of operator profiles, and this is {VERSION}: measure it anew.")
    devices = kind._replace(processors=tuple(kind.processors))
    seconds, dates = ({key: row[place] for key, row in rows.items()} for place in (0, 1))
    return OperatorProfile(devices, seconds, dates, str(path))  # type: ignore[arg-type]


def opened_profile(path: Path, devices: ProfileDevices) -> OperatorProfile:
    """Profile in a file to which times of these devices are added; an empty one where there is no file.

    Raises:
        DataError: the file has times of other devices or another version of JAX.
    """
    if not path.exists():
        return OperatorProfile(devices, name=str(path))
    found = read_profile(path)
    for name, one, here in zip(ProfileDevices._fields, found.devices, devices, strict=True):
        if one != here:
            raise DataError(
                f"{path} has times of {name} {one}, and here it is {here}: give another file for these devices."
            )
    return found
