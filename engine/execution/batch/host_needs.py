"""Sampling features that need the previous token on the host. A step that uses one cannot be launched ahead."""

from core.types import SamplingParams


def host_needs(sampling: SamplingParams) -> str:
    """Say what the host works out from the very last token before the next one can be sampled; empty where there is nothing."""
    if sampling.grammar is not None:
        return "grammar"
    if sampling.thinking is not None:
        return "thinking budget"
    if sampling.bad_words and any(len(word) > 1 for word in sampling.bad_words):
        return "bad words of several tokens"
    return ""
