"""Decides which draft tokens the next step computes, and when it is worth while to look for some.

Draft tokens need known tokens, while a step that is planned ahead does not know what the one before it samples. So where draft
tokens pay, steps are planned one at a time; where they do not, steps are planned ahead, and now and then it is tried again, as
seldom as makes what trials lose a small share of the time.

What a grammar forces is proposed, too, whoever else proposes: the ranks say so with the token before it (`Sequence.run`), so
nobody has to look for it. A draft model or a head on the rank proposes tokens that are not known here: then it is decided how
many."""

from collections import deque
from collections.abc import Sequence as SeqOf
from math import inf

from core.config.cluster_config import EngineConfig
from core.cost.steps import StepModels
from core.plan import PROPOSED, StepPlan, StepResult
from core.prompt_images import FIRST_ROW
from core.types import TokenId
from engine.planning.sequence import Sequence
from engine.planning.sequence_table import SequenceTable
from engine.planning.speculation.acceptance import Acceptance
from engine.planning.speculation.draft_lengths import draft_lengths, longest_proposal
from engine.planning.speculation.drafter import Draft, Drafter
from engine.planning.speculation.pause import Pause
from engine.planning.speculation.prompt_lookup import PromptLookup
from engine.planning.speculation.proposal_pace import ProposalPace
from engine.planning.speculation.proposals import Proposals
from engine.planning.speculation.realised_gain import RealisedGain
from engine.planning.speculation.trial_time import TrialTime

_FORCED = "grammar"
"""The source of what a grammar forces."""
_LONGEST_RUN = 64
"""Tokens of a forced run in one step. It is not `engine.speculate_tokens`, since these draft tokens are right."""
_LONGEST_MATCH = 32
"""What a forced run counts as."""
_LEAST_GAIN = 1.02
"""Draft tokens must really have produced so many times the tokens a second."""
_MOST_DRAFTING = 128
_REST_STEPS = 64
"""Steps without draft tokens behind one with them that has found no memory."""
_PLAIN_STEPS = 6
"""Steps without draft tokens that are measured behind so many with them: the first two still wait for those before."""

Drafts = dict[str, tuple[TokenId, ...]]
_SeqDraft = tuple[Sequence, Draft]


class Speculator:
    """Owned by one StepScheduler."""

    def __init__(self, drafter: Drafter | None, config: EngineConfig, max_context_tokens: int) -> None:
        self._drafter, self._most = drafter, config.speculate_tokens
        self._max_batch_tokens, self._max_context_tokens = config.max_batch_tokens, max_context_tokens
        self._most_rows = max(config.max_num_seqs, 1 + config.speculate_tokens)
        """Logits of one step: memory is reckoned for `max_num_seqs` of them."""
        self._looks, self._runs = Pause(), Pause()
        self._acceptance, self._gain, self._pace = Acceptance(), RealisedGain(), ProposalPace()
        self._trials, self._is_trial = TrialTime(), False
        """Whether the last step with draft tokens was one, for which somebody had to look."""
        self._num_drafting = 0
        """Steps with draft tokens since some without were measured."""
        self._proposed: dict[str, Draft] = {}
        """The last draft of each sequence, by key. A step in flight may compute some of it."""
        self.counts = (0, 0)
        """The number of draft tokens that steps have computed, and of those that were right."""

    def awaits(self, in_flight: deque[StepPlan], table: SequenceTable) -> bool:
        """Return whether the next step is to be planned when those in flight are committed, since draft tokens follow what they
        sample."""
        if not in_flight:
            return False
        if any(work.drafts for work in in_flight[-1].work):
            return True
        if not (self._may_look(len(table.running)) or self._may_run(table.running)):
            return False
        return not table.has_prompts and table.has_pending

    def draft(self, decoding: SeqOf[Sequence], table: SequenceTable, steps: StepModels) -> Drafts:
        """Return draft tokens for sequences that the next step decodes, by key. There are none while prompts are computed or
        wait, which have better use for the step's time."""
        may_look, may_run = self._may_look(len(decoding)), self._may_run(decoding)
        self._looks.passed()
        self._runs.passed()
        is_unknown = table.has_prompts or any(seq.num_pending for seq in decoding)
        if is_unknown or not (may_look or may_run):
            return {}
        may_look = may_look and self._is_measured(len(decoding), steps)
        runs = self._forced(decoding) if may_run else []
        found = self._found(decoding) if may_look else []
        if self._is_untried(found):
            found = [found[_cheapest(found, 0)]]
        drafts = runs + found
        lengths = self._lengths(drafts, decoding, steps)
        if may_run:
            self._runs.tried(any_found=bool(runs), any_chosen=any(lengths[: len(runs)]))
        if may_look:
            self._looked(drafts, lengths, len(runs), self._gain.gain(len(decoding)))
        elif any(lengths):
            self._is_trial = False
        self._proposed |= {seq.key: draft for seq, draft in drafts}
        return {
            seq.key: draft.tokens[:length]
            for (seq, draft), length in zip(drafts, lengths, strict=True)
            if length
        }

    def _looked(self, drafts: list[_SeqDraft], lengths: list[int], num_runs: int, gain: float) -> None:
        """Learn what came of looking for draft tokens, which are those of `drafts` behind the first `num_runs`. A trial may be
        forced: then one of `lengths` becomes 1."""
        is_chosen, any_found = any(lengths[num_runs:]), len(drafts) > num_runs
        is_forced = not any(lengths) and self._looks.is_longest and self._trials.is_paid
        self._looks.tried(any_found=any_found, any_chosen=is_chosen and gain >= _LEAST_GAIN)
        self._num_drafting += is_chosen
        if is_forced and any_found:
            # What draft tokens cost, and how often they are right, is learned from draft tokens alone.
            lengths[_cheapest(drafts, num_runs)] = 1
        self._is_trial = not (is_chosen and _LEAST_GAIN <= gain < inf)

    def committed(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Learn when a step's tokens were known."""
        time = self._gain.committed(plan, result, now)
        self._trials.passed(time.took_s)
        if self._is_trial:
            self._trials.lost(time.lost_s)
        self._pace.observe(plan, result)

    def verified(self, seq: Sequence, proposed: int, right: int) -> None:
        """Learn that the first `right` of the `proposed` tokens that a step computed were what the sequence sampled."""
        draft, slo = self._proposed.pop(seq.key), seq.request.slo.name
        if self._drafter is not None and draft.source != _FORCED:
            self._drafter.verified(seq, proposed, right)
        self.counts = (self.counts[0] + proposed, self.counts[1] + right)
        self._acceptance.observe(draft.source, slo, draft.match, proposed=proposed, right=right)

    def rest(self) -> None:
        """Propose nothing for a while: a step with draft tokens has found no memory."""
        self._looks.rest(_REST_STEPS)
        self._runs.rest(_REST_STEPS)

    def left(self, seq: Sequence) -> None:
        """Forget a sequence that is not here any more."""
        self._proposed.pop(seq.key, None)
        if self._drafter is not None:
            self._drafter.left(seq)

    def _is_measured(self, num_seqs: int, steps: StepModels) -> bool:
        """Return whether it is known how long steps without draft tokens take. Begin a few of them where it is not, or was long
        ago. What is forced has to be computed anyway, and is not asked about."""
        if steps.decode.num_steps == 0:
            return True
        if self._gain.is_known(num_seqs) and self._num_drafting < _MOST_DRAFTING:
            return True
        self._num_drafting = 0
        self._looks.rest(_PLAIN_STEPS)
        return False

    def _may_look(self, num_seqs: int) -> bool:
        """Return whether to look for draft tokens: not where they are known not to pay, as long as trials have lost enough."""
        if self._drafter is None or not num_seqs or not self._looks.is_over:
            return False
        return self._trials.is_paid or self._gain.gain(num_seqs) >= _LEAST_GAIN

    def _may_run(self, seqs: SeqOf[Sequence]) -> bool:
        """Return whether a step could compute tokens that are forced. One of them is sampled by a step in flight, if there is
        one."""
        return self._runs.is_over and any(len(seq.run) > bool(seq.num_pending) for seq in seqs)

    def _forced(self, seqs: SeqOf[Sequence]) -> list[_SeqDraft]:
        return [
            (seq, Draft(seq.run[:most], _FORCED, _LONGEST_MATCH))
            for seq in seqs
            if seq.run and (most := self._room(seq, _LONGEST_RUN)) > 0
        ]

    def _found(self, seqs: SeqOf[Sequence]) -> list[_SeqDraft]:
        """Return what the drafter proposes for sequences of which nothing is forced."""
        able = [(seq, most) for seq in seqs if not seq.run and (most := self._room(seq, self._most)) > 0]
        if self._drafter is None or not able:
            return []
        found = self._drafter.draft([seq for seq, _ in able], self._most)
        cut = [
            (seq, Draft(_text_of(draft.tokens[:most]), draft.source, draft.match))
            for (seq, most), draft in zip(able, found, strict=True)
            if draft is not None
        ]
        return [(seq, draft) for seq, draft in cut if draft.tokens]

    def _is_untried(self, found: list[_SeqDraft]) -> bool:
        """Return whether a draft model is to make `found` of whose pace nothing is known: one sequence shows it."""
        return any(draft.tokens[0] == PROPOSED for _, draft in found) and not self._pace.each_s(1)

    def _room(self, seq: Sequence, most: int) -> int:
        """Return how many draft tokens its output has room for. A sequence whose KV is sent on has none: it may change over after
        any token."""
        if seq.push is not None or seq.num_missing != 1:
            return 0
        left = min(
            seq.request.sampling.max_tokens - seq.num_output, self._max_context_tokens - len(seq.tokens)
        )
        return min(most, left - 1)

    def _lengths(self, drafts: list[_SeqDraft], decoding: SeqOf[Sequence], steps: StepModels) -> list[int]:
        num_seqs, model = len(decoding), steps.decode
        context = sum(len(seq.tokens) for seq in decoding)
        chances = [
            self._acceptance.chances(draft.source, seq.request.slo.name, draft.match, draft.tokens)
            for seq, draft in drafts
        ]
        step_s, limit = (
            model.step_s(num_seqs, context, num_seqs),
            min(self._most_rows, self._max_batch_tokens) - num_seqs,
        )
        proposed = [draft.tokens[0] == PROPOSED for _, draft in drafts]
        each_s = self._pace.each_s(sum(proposed))
        asked = [each for each, is_proposed in zip(chances, proposed, strict=True) if is_proposed]
        token_s = model.one_more_s(num_seqs)
        most = longest_proposal(asked, num_seqs, step_s, token_s, limit, each_s)
        cut = [
            each[:most] if is_proposed else each for each, is_proposed in zip(chances, proposed, strict=True)
        ]
        return draft_lengths(cut, num_seqs, step_s, token_s, limit, most * each_s)


def _text_of(tokens: tuple[TokenId, ...]) -> tuple[TokenId, ...]:
    """Return the tokens before the first one that stands for an image, which is never sampled."""
    return next((tokens[:at] for at, token in enumerate(tokens) if token >= FIRST_ROW), tokens)


def _cheapest(drafts: list[_SeqDraft], first: int) -> int:
    """Return which of `drafts` from `first` on to try. A draft model may have to read a sequence of which it makes one draft
    token: so that comes behind others, and of several the shortest one is tried."""

    def cost(at: int) -> tuple[bool, int]:
        seq, draft = drafts[at]
        return len(draft.tokens) == 1, len(seq.tokens)

    return min(range(first, len(drafts)), key=cost)


def make_speculator(config: EngineConfig, max_context_tokens: int) -> Speculator:
    """Return one with the drafter that `engine.speculate` asks for."""
    drafter: Drafter | None = None
    match config.speculate:
        case "ngram":
            drafter = PromptLookup()
        case "none":
            pass
        case _:
            drafter = Proposals()
    return Speculator(drafter, config, max_context_tokens)
