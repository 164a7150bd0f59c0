"""Decides which guesses the next step computes, and when it is worth while to look for some.

Guesses need known tokens, while a step that is planned ahead does not know what the one before it draws. So where guesses pay,
steps are planned one at a time; where they do not, steps are planned ahead, and now and then it is tried again."""

from collections import deque
from collections.abc import Sequence as SeqOf

from core.config import EngineConfig
from core.plan import StepPlan
from core.steps import StepModels
from core.types import TokenId
from engine.planning.sequence import Sequence
from engine.planning.sequence_table import SequenceTable
from engine.planning.speculation.acceptance import Acceptance
from engine.planning.speculation.draft_lengths import draft_lengths
from engine.planning.speculation.drafter import Draft, Drafter
from engine.planning.speculation.prompt_lookup import PromptLookup
from engine.planning.speculation.suffix_drafter import SuffixDrafter

_LONGEST_PAUSE = 64
"""Steps between two looks where guesses do not pay."""
_PAUSE_WITHOUT_DRAFTS = 4
"""The same where there was nothing to guess from: the text may repeat itself soon."""

Drafts = dict[str, tuple[TokenId, ...]]


class Speculator:
    """Owned by one StepScheduler."""

    def __init__(self, drafter: Drafter, config: EngineConfig, max_context_tokens: int) -> None:
        self._drafter, self._most = drafter, config.speculate_tokens
        self._max_batch_tokens, self._max_context_tokens = config.max_batch_tokens, max_context_tokens
        self._most_rows = max(config.max_num_seqs, 1 + config.speculate_tokens)
        """Logits of one step: memory is reckoned for `max_num_seqs` of them."""
        self._acceptance = Acceptance()
        self._guessed: dict[str, Draft] = {}
        """The last draft of each sequence, by key. A step in flight may compute some of it."""
        self._pause, self._next_pause = 0, 1
        self.counts = (0, 0)
        """The number of guesses that steps have computed, and of those that were right."""

    def awaits(self, in_flight: deque[StepPlan], table: SequenceTable) -> bool:
        """Return whether the next step is to be planned when those in flight are committed, since guesses follow what they
        draw."""
        if not in_flight:
            return False
        if any(work.drafts for work in in_flight[-1].work):
            return True
        return self._pause <= 0 and not table.has_prompts and table.has_pending

    def draft(self, decoding: SeqOf[Sequence], table: SequenceTable, steps: StepModels) -> Drafts:
        """Return guesses for sequences that the next step decodes, by key. There are none while prompts are computed or wait,
        which have better use for the step's time."""
        if self._pause > 0 or not decoding or table.has_prompts or any(seq.num_pending for seq in decoding):
            self._pause -= 1
            return {}
        able = [(seq, most) for seq in decoding if (most := self._room(seq)) > 0]
        found = self._drafter.draft([seq for seq, _ in able], self._most) if able else []
        drafts = [
            (seq, Draft(draft.tokens[:most], draft.source, draft.match))
            for (seq, most), draft in zip(able, found, strict=True)
            if draft is not None
        ]
        lengths = self._lengths(drafts, decoding, steps)
        is_trial = not any(lengths) and self._next_pause == _LONGEST_PAUSE
        self._look_again(bool(drafts), any(lengths))
        if is_trial and drafts:
            lengths[0] = 1  # what guesses cost, and how often they are right, is learned from guesses alone
        self._guessed |= {seq.key: draft for seq, draft in drafts}
        return {
            seq.key: draft.tokens[:length]
            for (seq, draft), length in zip(drafts, lengths, strict=True)
            if length
        }

    def verified(self, seq: Sequence, guessed: int, right: int) -> None:
        """Learn that the first `right` of the `guessed` tokens that a step computed were what the sequence drew."""
        draft, slo = self._guessed.pop(seq.key), seq.request.slo.name
        self.counts = (self.counts[0] + guessed, self.counts[1] + right)
        self._acceptance.observe(draft.source, slo, draft.match, guessed=guessed, right=right)

    def left(self, seq: Sequence) -> None:
        """Forget a sequence that is not here any more."""
        self._guessed.pop(seq.key, None)
        self._drafter.left(seq)

    def _room(self, seq: Sequence) -> int:
        """Return how many guesses its output has room for. A sequence whose KV is sent on has none: it may change over after
        any token."""
        if seq.push is not None or seq.num_missing != 1 or seq.request.sampling.grammar is not None:
            return 0
        most = min(
            seq.request.sampling.max_tokens - seq.num_output, self._max_context_tokens - len(seq.tokens)
        )
        return min(self._most, most - 1)

    def _lengths(
        self, drafts: list[tuple[Sequence, Draft]], decoding: SeqOf[Sequence], steps: StepModels
    ) -> list[int]:
        num_seqs, law = len(decoding), steps.decode
        context = sum(len(seq.tokens) for seq in decoding)
        chances = [
            self._acceptance.chances(draft.source, seq.request.slo.name, draft.match, draft.tokens)
            for seq, draft in drafts
        ]
        return draft_lengths(
            chances,
            num_seqs,
            law.step_s(num_seqs, context, num_seqs),
            law.token_s,
            min(self._most_rows, self._max_batch_tokens) - num_seqs,
        )

    def _look_again(self, any_found: bool, any_chosen: bool) -> None:
        """Look at the next step where something was chosen, else ever later."""
        if any_chosen:
            self._pause, self._next_pause = 0, 1
            return
        self._pause = self._next_pause
        longest = _LONGEST_PAUSE if any_found else _PAUSE_WITHOUT_DRAFTS
        self._next_pause = min(longest, 2 * self._next_pause)


def make_speculator(config: EngineConfig, max_context_tokens: int) -> Speculator | None:
    """Return what `engine.speculate` asks for, or None where nothing is guessed."""
    match config.speculate:
        case "ngram":
            return Speculator(PromptLookup(), config, max_context_tokens)
        case "suffix":
            return Speculator(SuffixDrafter(), config, max_context_tokens)
        case "none":
            return None
