"""Train the model that ships with Baton, from the running interpreter's own standard library.

    python tools/train_embedded.py                 about 50 minutes on two cores with AVX-512 BF16
    python tools/train_embedded.py --steps 200     a quick look

Everything follows from --seed on one machine: the held-out files (by a hash of their names), the tokenizer, the order of the
samples and the initial weights. Writes config, tokenizer, chat template, bfloat16 weights, metrics.json and README.md into
--out. Matrices are trained with Muon (Jordan et al., 2024), the rest with AdamW; the last tenth runs on long sequences."""

import argparse
import ast
import hashlib
import json
import math
import platform
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Loss = Callable[[LlamaForCausalLM, Tensor], Tensor]

END, SYSTEM, USER, ASSISTANT = "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"
VOCAB_SIZE = 4096
CONTEXT_TOKENS = 2048
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}{{ '<|assistant|>\\n' + message.content + '<|endoftext|>' }}"
    "{%- elif message.role in ('system', 'developer') -%}{{ '<|system|>\\n' + message.content + '\\n' }}"
    "{%- else -%}{{ '<|user|>\\n' + message.content + '\\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}"
)


def main() -> None:
    args = _arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    train_texts, held_out_texts = read_corpus()
    tokenizer = train_tokenizer(train_texts)
    args.out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, args.out)
    data = torch.tensor(
        encode(tokenizer, train_texts + chat_samples(train_texts, tokenizer)), dtype=torch.int32
    )
    held_out = torch.tensor(encode(tokenizer, held_out_texts), dtype=torch.int32)
    held_out_bytes = sum(len(text.encode()) for text in held_out_texts)
    model = LlamaForCausalLM(model_config(tokenizer)).train()
    print(f"{len(data):,} training tokens, {len(held_out):,} held out, {model.num_parameters():,} parameters")
    started = time.monotonic()

    def export(step: int) -> None:
        bits = bits_per_byte(model, held_out, held_out_bytes)
        metrics = {
            "held_out_bits_per_byte": round(bits, 4),
            "held_out_bytes": held_out_bytes,
            "seed": args.seed,
            "steps": step,
            "train_tokens_seen": step * args.batch_tokens,
            "corpus_tokens": len(data),
            "parameters": model.num_parameters(),
            "train_minutes": round((time.monotonic() - started) / 60, 1),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        save_model(model, tokenizer, args.out, metrics)

    train(model, data, args, export, cross_entropy)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "models" / "embedded")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--export-every", type=int, default=300, help="steps between exports")
    parser.add_argument("--seed", type=int, default=20261120)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def read_corpus() -> tuple[list[str], list[str]]:
    """(training, held-out) texts of the standard library without its tests; one file in 32 is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {
        "site-packages",
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        "pydoc_data",
        "lib2to3",
        "turtledemo",
    }
    train: list[str] = []
    held_out: list[str] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        # Generated tables (encodings of code pages and the like) teach nothing but themselves.
        if skip & set(name.parts) or (
            name.parts[0] == "encodings" and name.stem.startswith(("cp", "iso", "mac", "koi"))
        ):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        is_held_out = hashlib.blake2b(str(name).encode()).digest()[0] % 32 == 0
        (held_out if is_held_out else train).append(text)
    return train, held_out


def chat_samples(texts: list[str], tokenizer: Tokenizer) -> list[str]:
    """Functions with a docstring as conversations: the docstring's first paragraph asks, the source answers."""
    samples: list[str] = []
    for text in texts:
        for node in _functions(text):
            asked = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            source = textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "")
            if 12 <= len(asked) <= 200 and len(source) < 1600:
                samples.append(f"{USER}\n{asked}\n{ASSISTANT}\n{source}")
    return samples


def _functions(text: str) -> Iterator[ast.FunctionDef]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, SYSTEM, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    end = tokenizer.token_to_id(END)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        ids += [*encoding.ids, end]
    return ids


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    end = tokenizer.token_to_id(END)
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=None,
        use_cache=False,
    )


class Muon(torch.optim.Optimizer):
    """Momentum whose update is the nearest (semi-)orthogonal matrix, by five Newton-Schulz steps."""

    def __init__(self, matrices: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(buffer, group["momentum"]))
                p.mul_(1 - 0.1 * group["lr"])
                p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))


def orthogonal(gradient: Tensor) -> Tensor:
    x = gradient.bfloat16()
    flip = x.shape[0] > x.shape[1]
    x = x.T if flip else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return (x.T if flip else x).to(gradient.dtype)


def train(
    model: LlamaForCausalLM,
    data: Tensor,
    args: argparse.Namespace,
    export: Callable[[int], None],
    loss_of: Loss,
) -> None:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in name)]
    optimizers = [Muon(matrices, 8e-3), torch.optim.AdamW(others, 4e-3, betas=(0.9, 0.95), weight_decay=0.0)]
    base = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(args.seed)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=args.steps)
        for step in range(args.steps):
            rate = _rate(step, args.steps)
            for optimizer, lr in zip(optimizers, base, strict=True):
                optimizer.param_groups[0]["lr"] = lr * rate
            length = CONTEXT_TOKENS if step >= 0.9 * args.steps else 512
            loss = loss_of(model, sample(data, args.batch_tokens // length, length, generator))
            loss.backward()
            nn.utils.clip_grad_norm_(others, 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            bar.update(task, advance=1, description=f"loss {loss.item():.3f}")
            if step % 20 == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
            if (step + 1) % args.export_every == 0 or step + 1 == args.steps:
                export(step + 1)


def _rate(step: int, steps: int) -> float:
    """Warm up over 2 %, hold, then fall to zero over the last 45 %."""
    done = step / steps
    return min(1.0, (step + 1) / (0.02 * steps + 1), (1 - done) / 0.45)


def sample(data: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(data) - length, (batch,), generator=generator)
    return torch.stack([data[s : s + length] for s in starts.tolist()]).long()


def cross_entropy(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB_SIZE).float(), ids[:, 1:].reshape(-1))


@torch.inference_mode()
def bits_per_byte(model: LlamaForCausalLM, held_out: Tensor, num_bytes: int, length: int = 1024) -> float:
    """Negative log-likelihood of the held-out tokens in windows of `length`, per byte of their text."""
    model.eval()
    total = 0.0
    for start in range(0, len(held_out) - 1, length):
        ids = held_out[start : start + length + 1].long()[None]
        if ids.shape[1] > 1:
            total += cross_entropy(model, ids).item() * (ids.shape[1] - 1)
    model.train()
    return total / math.log(2) / num_bytes


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path, metrics: dict[str, object]) -> None:
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    end = tokenizer.token_to_id(END)
    copy.config.use_cache = True
    copy.generation_config = GenerationConfig(
        eos_token_id=end, bos_token_id=end, temperature=0.7, top_p=0.95, do_sample=True
    )
    copy.bfloat16().save_pretrained(out)
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    (out / "README.md").write_text(_card(metrics))


def _card(metrics: dict[str, object]) -> str:
    rows = "\n".join(f"| {name.replace('_', ' ')} | {value} |" for name, value in metrics.items())
    return f"""# baton-embedded

The model that Baton serves by default: a small Llama trained by `train.py` in this folder on the Python standard library's own
source (without its tests), so that completions look like Python. It is for trying Baton and testing it, not for writing code.

| | |
|---|---|
{rows}

One file in 32, chosen by a hash of its name, was held out of training and of the tokenizer; "held out bits per byte" is the
negative log-likelihood of those files in windows of 1,024 tokens. Chat turns are `<|system|>`, `<|user|>` and
`<|assistant|>` lines; the model saw docstrings as questions and the functions' sources as answers.

The standard library is distributed under the PSF licence. This page is written by `train.py`.
"""


if __name__ == "__main__":
    main()
