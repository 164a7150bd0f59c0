"""From logits to tokens: grammars, logit processors, sampling, verification."""
