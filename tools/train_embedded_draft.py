"""Train the draft model that proposes for the embedded one (`--speculate draft:embedded/draft`), from what that one says.

    python tools/train_embedded_draft.py           about 10 minutes of one core with AVX-512 BF16

It has the embedded model's tokenizer and learns its distributions (Hinton et al., 2015) over the text that it was trained on.
Writes config, tokenizer, bfloat16 weights, metrics.json and README.md into --out."""

import argparse
import json
import platform
import time
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn
from train import (
    CONTEXT_TOKENS,
    VOCAB_SIZE,
    bits_per_byte,
    chat_samples,
    encode,
    read_corpus,
    save_tokenizer,
    train,
)
from transformers import LlamaConfig, LlamaForCausalLM

TARGET = Path(__file__).parents[1] / "models" / "embedded"


def main() -> None:
    args = _arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    train_texts, held_out_texts = read_corpus()
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    args.out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, args.out)
    data = torch.tensor(
        encode(tokenizer, train_texts + chat_samples(train_texts, tokenizer)), dtype=torch.int32
    )
    held_out = torch.tensor(encode(tokenizer, held_out_texts), dtype=torch.int32)
    held_out_bytes = sum(len(text.encode()) for text in held_out_texts)
    target = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16).eval()
    model = LlamaForCausalLM(_config(target.config)).train()
    _begin_with_embedding(model, target)
    print(f"{len(data):,} training tokens, {model.num_parameters():,} parameters")

    def export(step: int) -> None:
        metrics = {
            "held_out_bits_per_byte": round(bits_per_byte(model, held_out, held_out_bytes), 4),
            "held_out_agreement": round(agreement(model, target, held_out), 4),
            "seed": args.seed,
            "steps": step,
            "train_tokens_seen": step * args.batch_tokens,
            "parameters": model.num_parameters(),
            "train_processor_minutes": round(time.process_time() / 60, 1),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        _save(model, args.out, metrics)

    def loss_of(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
        return divergence(model, target, ids)

    train(model, data, args, export, loss_of)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=TARGET / "draft")
    parser.add_argument("--steps", type=int, default=330)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--export-every", type=int, default=330, help="steps between exports")
    parser.add_argument("--seed", type=int, default=20261125)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def _config(target: LlamaConfig) -> LlamaConfig:
    """Two layers, since one alone cannot copy what followed a token before."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=304,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=None,
        use_cache=False,
    )


@torch.no_grad()
def _begin_with_embedding(model: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """Begin with the target's embedding, in the directions in which its tokens differ most."""
    own = model.get_input_embeddings().weight
    left, sizes, _ = torch.linalg.svd(target.get_input_embeddings().weight.float(), full_matrices=False)
    own.copy_(left[:, : own.shape[1]] * sizes[: own.shape[1]])


def divergence(model: LlamaForCausalLM, target: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return how far the draft's distributions are from the target's, in nats a token."""
    with torch.no_grad():
        wanted = target(ids).logits.reshape(-1, VOCAB_SIZE).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids).logits.reshape(-1, VOCAB_SIZE).float()
    return nn.functional.kl_div(
        logits.log_softmax(-1), wanted.log_softmax(-1), reduction="batchmean", log_target=True
    )


@torch.inference_mode()
def agreement(
    model: LlamaForCausalLM, target: LlamaForCausalLM, held_out: Tensor, length: int = 512
) -> float:
    """Return how often both find the same token the likeliest."""
    ids = held_out[: len(held_out) // length * length].reshape(-1, length)[:16].long()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        equal = model(ids).logits.argmax(-1) == target(ids).logits.argmax(-1)
    return equal.float().mean().item()


def _save(model: LlamaForCausalLM, out: Path, metrics: dict[str, object]) -> None:
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.config.use_cache = True
    copy.bfloat16().save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    rows = "\n".join(f"| {name.replace('_', ' ')} | {value} |" for name, value in metrics.items())
    (out / "README.md").write_text(
        f"""# baton-embedded-draft

The draft model of baton-embedded: a smaller Llama with the same tokenizer, which `train_draft.py` in the folder above has taught
what baton-embedded says of the Python standard library's source. It is for drafting, not for answers.

| | |
|---|---|
{rows}

"held out agreement" is the share of the tokens of held-out files behind which both models find the same next token the
likeliest. This page is written by `train_draft.py`.
"""
    )


if __name__ == "__main__":
    main()
