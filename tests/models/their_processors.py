"""Processors of transformers whose classes need torchvision: their own layout of tokens, over their own image processors."""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers


def _their(method: str, family: str) -> Callable[..., str]:
    """Return a method of a family's processor from its file, which may not be importable."""
    path = Path(transformers.__file__).parent / f"models/{family}/processing_{family}.py"
    found = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    node = next(node for node in found if node.name == method)
    names: dict[str, Any] = {}
    exec(compile(ast.Module([node], []), str(path), "exec"), names)
    return names[method]


class _TheirLayout:
    """What tests ask of a processor. Its subclasses have `replace_image_token`, transformers' own."""

    image_token: str
    replace_image_token: Callable[..., str]
    types_tokens = False
    """Whether the model takes which of the tokens are images'."""
    for_layout_alone: tuple[str, ...] = ()
    """What the image processor says that the model does not take."""

    def __init__(self, tokenizer: Any, template: str, images: Any) -> None:
        self.tokenizer, self.chat_template, self.image_processor = tokenizer, template, images

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, chat_template=self.chat_template, **options)

    def __call__(self, text: list[str], images: Any, **_: Any) -> dict[str, Any]:
        read = dict(self.image_processor(images=images, return_tensors="pt")) if images else {}
        first, *rest = text[0].split(self.image_token)
        shows = (self.replace_image_token(read, number) for number in range(len(rest)))
        whole = first + "".join(shown + said for shown, said in zip(shows, rest, strict=True))
        ids = torch.tensor([self.tokenizer.encode(whole, add_special_tokens=False)])
        out = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **read}
        for name in self.for_layout_alone:
            out.pop(name, None)
        if self.types_tokens:
            out["mm_token_type_ids"] = (ids == self.tokenizer.convert_tokens_to_ids(self.image_token)).int()
        return out

    def _save_tokenizer(self, folder: Path) -> None:
        self.tokenizer.chat_template = self.chat_template
        self.tokenizer.save_pretrained(folder)
        self.tokenizer.chat_template = None


class TheirPixtral(_TheirLayout):
    image_token, image_break_token, image_end_token = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
    replace_image_token = _their("replace_image_token", "pixtral")

    def __init__(self, tokenizer: Any, template: str, merge: int) -> None:
        self.patch_size, self.spatial_merge_size = 8, merge
        edge = 8 * merge
        images = transformers.PixtralImageProcessorPil(
            size={"longest_edge": 64}, patch_size={"height": edge, "width": edge}
        )
        super().__init__(tokenizer, template.replace("IMAGE", self.image_token), images)

    def save_pretrained(self, folder: Path) -> None:
        self._save_tokenizer(folder)
        self.image_processor.save_pretrained(folder)
        said = {
            "processor_class": "PixtralProcessor",
            "patch_size": self.patch_size,
            "spatial_merge_size": self.spatial_merge_size,
            "image_token": self.image_token,
        }
        (folder / "processor_config.json").write_text(json.dumps(said))


class TheirQwen(_TheirLayout):
    image_token = "<|image_pad|>"
    types_tokens = True
    replace_image_token = _their("replace_image_token", "qwen2_vl")

    def __init__(self, tokenizer: Any, template: str, name: str) -> None:
        """`name` is the processor's."""
        self._name = name
        images = transformers.Qwen2VLImageProcessorPil(
            size={"shortest_edge": 32 * 32, "longest_edge": 64 * 96}, patch_size=8, merge_size=2
        )
        shown = template.replace("IMAGE", f"<|vision_start|>{self.image_token}<|vision_end|>")
        super().__init__(tokenizer, shown, images)

    def save_pretrained(self, folder: Path) -> None:
        """As transformers 5 does: all in one file."""
        self._save_tokenizer(folder)
        said = {"processor_class": self._name, "image_processor": self.image_processor.to_dict()}
        (folder / "processor_config.json").write_text(json.dumps(said))


class TheirInternVL(_TheirLayout):
    start_image_token, image_token, end_image_token = "<img>", "<IMG_CONTEXT>", "</img>"
    image_seq_length = 4
    for_layout_alone = ("num_patches",)
    replace_image_token = _their("replace_image_token", "internvl")

    def __init__(self, tokenizer: Any, template: str) -> None:
        images = transformers.GotOcr2ImageProcessorPil(
            size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=4
        )
        super().__init__(tokenizer, template.replace("IMAGE", self.image_token), images)

    def save_pretrained(self, folder: Path) -> None:
        self._save_tokenizer(folder)
        self.image_processor.save_pretrained(folder)
        said = {"processor_class": "InternVLProcessor", "image_seq_length": self.image_seq_length}
        (folder / "processor_config.json").write_text(json.dumps(said))
