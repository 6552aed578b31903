"""Small tokenizers of the two kinds that language models have, made without files from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog, 1234 times.",
    "Größe, naïve café, 日本語, emoji 🙂🙂, tabs\tand\nlines.",
] * 3


def byte_level() -> Tokenizer:
    """Byte-level BPE, as GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def sentence_piece() -> Tokenizer:
    """BPE with bytes for unknown characters, as SentencePiece's in LLaMA."""
    characters = sorted({c for text in TEXTS for c in text if c.isascii() and c.isprintable()} - {" "})
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *characters, "▁t", "he", "▁the", "▁q"]:
        vocabulary[token] = len(vocabulary)
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "q")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, settings: dict[str, Any], **files: Any) -> Path:
    """Write a tokenizer as transformers does, and further JSON files by their names without suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in {"tokenizer_config": settings, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder
