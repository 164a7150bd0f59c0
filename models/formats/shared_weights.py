"""One copy of a model's packed weights for all processes of a host (docs/adr/115)."""

import logging
from pathlib import Path
from typing import Final, Protocol, TypeVar

from core.start_timer import StartTimer
from kernels.cpu.library import native
from kernels.cpu.weights_file import DamagedFile, KeptArena, MappedFile
from kernels.ops import Ops
from models.files.weights_folder import WeightsDraft, WeightsFolder, default_folder
from models.files.weights_identity import NamedCut, weights_bytes, weights_key
from models.formats.checkpoint import Shard, whole
from models.formats.kept_matrices import MatrixReader, MatrixRecorder

_log = logging.getLogger(__name__)
LEAST_BYTES: Final = 128 << 20
"""The size of a checkpoint from which on `auto` stores its packed weights. Smaller ones are packed in moments."""
_LEAST_SHARE: Final = 4
"""Packed weights take at least this part of a checkpoint's bytes: they may have 4 bits instead of 16."""
M_co = TypeVar("M_co", covariant=True)


class BuildModel(Protocol[M_co]):
    """Make the model with these operations. Without `reads_matrices` its matrices are asked for without content."""

    def __call__(self, own: Ops, /, *, reads_matrices: bool) -> M_co: ...


def place_of(setting: str, folder: Path) -> Path | None:
    """Return where packed weights of the checkpoint in `folder` are stored; None where they are each process's own. `setting`:
    `auto`, `none` or a folder."""
    if setting == "none" or native() is None:
        return None
    if setting != "auto":
        return Path(setting).expanduser()
    return default_folder() if weights_bytes(folder) >= LEAST_BYTES else None


class SharedWeights:
    """The packed weights of a rank's part of a model: those of a file, if there is one, or else such as become a file."""

    def __init__(self, folder: WeightsFolder, key: str) -> None:
        self._folder, self._key = folder, key

    @classmethod
    def of(cls, setting: str, folder: Path, shard: Shard, *said: object) -> "SharedWeights | None":
        """Return None where weights stay each process's own. `setting`: `auto`, `none` or a folder. `said`: what the weights'
        packed form depends on besides the checkpoint and the `shard`."""
        cut = "whole" if shard is whole else shard.identity if isinstance(shard, NamedCut) else ""
        if not cut:
            return None
        path = place_of(setting, folder)
        if path is None:
            return None
        try:
            kept_in = WeightsFolder(path)
            if kept_in.has_room(weights_bytes(folder) // _LEAST_SHARE):
                return cls(kept_in, weights_key(folder, cut, *said))
            _say_private(f"{path} has too little room")
        except OSError as error:
            _say_private(str(error))
        return None

    def load(self, ops: Ops, build: BuildModel[M_co], timer: StartTimer) -> M_co:
        """Load the model. Where another process packs the same weights, wait for them. Raises what `build` does."""
        try:
            with timer.within("mapping"):
                found = self._folder.claim(self._key)
        except OSError as error:
            _say_private(str(error))
            found = None
        match found:
            case MappedFile():
                return self._read(found, ops, build)
            case WeightsDraft():
                return self._recorded(found, ops, build, timer)
            case None:
                return build(ops, reads_matrices=True)

    def _read(self, file: MappedFile, ops: Ops, build: BuildModel[M_co]) -> M_co:
        reader = MatrixReader(ops, file)
        try:
            model = build(reader.ops, reads_matrices=False)
            reader.finish()
        except (DamagedFile, KeyError, TypeError, ValueError, RuntimeError) as error:
            # What is wrong with the model itself is found again, with its content.
            _say_private(f"what was stored does not fit this model: {error}")
            self._folder.discard(self._key)
            return build(ops, reads_matrices=True)
        _log.info("packed weights are those of the file %s, which others may have mapped as well", self._key)
        return model

    def _recorded(self, draft: WeightsDraft, ops: Ops, build: BuildModel[M_co], timer: StartTimer) -> M_co:
        recorder = MatrixRecorder(ops, KeptArena(draft.beat))
        try:
            model = build(recorder.ops, reads_matrices=True)
        except BaseException:
            draft.give_up()
            raise
        with timer.within("mapping"):
            self._publish(recorder, draft)
        return model

    def _publish(self, recorder: MatrixRecorder, draft: WeightsDraft) -> None:
        num_bytes = recorder.num_bytes
        try:
            if not num_bytes:
                draft.give_up()
            elif self._folder.make_room(num_bytes):
                recorder.write(draft.file)
                draft.publish()
                _log.info(
                    "packed weights are stored in the file %s of %d MB", self._key, num_bytes // 1_000_000
                )
            else:
                draft.give_up()
                _say_private(f"they have {num_bytes // 1_000_000} MB, for which the disk has too little room")
        except OSError as error:
            draft.give_up()
            _say_private(str(error))


def _say_private(reason: str) -> None:
    _log.warning("packed weights are in this process's own memory, and are not shared: %s", reason)
