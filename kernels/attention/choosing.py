"""Chooses, for each kind of step and each window, the backend that is fastest there. It is measured once for a device, remembered
and logged."""

import logging
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from core.errors import ConfigError
from kernels.attention.case import Attend, Backend, Case, StepKind, kind_of
from kernels.attention.fastest import fastest
from kernels.attention.remembered import ChoiceFile, RememberedChoice
from kernels.attention.trial import LENS, Lens, Timer, fault, make_step, reference, timings
from kernels.ops import AttentionMeta, KVLayer

_log = logging.getLogger(__name__)


class ChosenAttention:
    """`Ops.paged_attention` by the backends that were chosen for the step's kind and the layer's window."""

    def __init__(self, chosen: Mapping[tuple[StepKind, int], Attend]) -> None:
        self._chosen = chosen

    def __call__(
        self, q: Tensor, kv_layer: KVLayer, meta: AttentionMeta, scale: float, window: int, soft_cap: float,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        attend = self._chosen[kind_of(meta), window]
        return attend(q, kv_layer, meta, scale, window, soft_cap, sinks)


class Chooser:
    """`about` names the device and the versions of all that computes: another one is measured again."""

    def __init__(
        self,
        device: torch.device,
        about: str,
        file: ChoiceFile,
        timer: Timer,
        lens: Mapping[StepKind, Lens] = LENS,
    ) -> None:
        self._device, self._about, self._file = device, about, file
        self._timer, self._lens = timer, lens

    def choose(self, cases: Sequence[Case], current: Backend, others: Sequence[Backend]) -> ChosenAttention:
        """Choose backends. `cases` differ in their window. `others` are used where they are able, right and faster than
        `current`."""
        return ChosenAttention(
            {
                (kind, case.window): self._best(kind, case, current, others)
                for case in cases
                for kind in self._lens
            }
        )

    def force(self, cases: Sequence[Case], backend: Backend) -> ChosenAttention:
        """Return the named backend for all cases. Raises ConfigError where it is unable or wrong."""
        for case in cases:
            if reason := backend.cannot(case):
                raise ConfigError(
                    f"engine.kernels is {backend.name}, which cannot serve this model: {reason}; use auto or triton"
                )
            for lens in self._lens.values():
                step = make_step(case, lens, self._device)
                if reason := fault(backend.attend, step, case, reference(step, case)):
                    raise ConfigError(
                        f"engine.kernels is {backend.name}, which does not work here: {reason}; use auto or triton"
                    )
        _log.info("attention: %s, as engine.kernels says", backend.name)
        return ChosenAttention({(kind, case.window): backend.attend for case in cases for kind in self._lens})

    def _best(self, kind: StepKind, case: Case, current: Backend, others: Sequence[Backend]) -> Attend:
        able = [current, *(backend for backend in others if not backend.cannot(case))]
        if len(able) == 1:
            return current.attend
        attends = {backend.name: backend.attend for backend in able}
        key = f"{self._about}; {kind}, {case}; {' '.join(attends)}"
        choice = self._file.find(key)
        remembered = choice is not None and choice.backend in attends
        if choice is None or not remembered:
            choice = self._measure(kind, case, attends, current.name)
            self._file.add(key, choice)
        medians = ", ".join(f"{name} {time_us:.1f} µs" for name, time_us in choice.medians_us.items())
        origin = "remembered" if remembered else "measured"
        _log.info("attention of %s, %s: %s (%s: %s)", kind, case, choice.backend, origin, medians)
        return attends[choice.backend]

    def _measure(
        self, kind: StepKind, case: Case, attends: Mapping[str, Attend], current: str
    ) -> RememberedChoice:
        step = make_step(case, self._lens[kind], self._device)
        expected = reference(step, case)
        right: dict[str, Attend] = {}
        for name, attend in attends.items():
            if reason := fault(attend, step, case, expected):
                _log.warning("attention of %s by %s is not used: %s", kind, name, reason)
            else:
                right[name] = attend
        if not right:
            raise ConfigError(
                "no attention kernel gives the reference's result on this device; use torch for engine.kernels"
            )
        times_s = timings(right, step, case, self._timer)
        medians_us = {name: 1e6 * median(times) for name, times in times_s.items()}
        return RememberedChoice(backend=fastest(times_s, current), medians_us=medians_us)
