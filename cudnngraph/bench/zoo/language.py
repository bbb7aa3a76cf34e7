"""Entries on text, on text with images, and on speech."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .entries import Entry, Input, Size, configured, tokens

F16, BF16 = torch.float16, torch.bfloat16
_LOGITS, _HIDDEN = ("logits",), ("last_hidden_state",)
_SMALL = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100},
    **{"num_attention_heads": 4, "max_position_embeddings": 64},
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_SEEN = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "image_size": 32, "patch_size": 8},
}


def _text(
    model: str,
    options: Mapping[str, Any],
    text: Input,
    results: tuple[str, ...] = _LOGITS,
    config: str = "",
    **fixed: Any,
) -> Size:
    kind = config or f"{model.partition('For')[0].removesuffix('Model')}Config"
    return configured("transformers", model, kind, options, (text,), results, **fixed)


def _causal(name: str, options: Mapping[str, Any], text: Input, config: str = "") -> Size:
    return _text(f"{name}ForCausalLM", options, text, config=config, use_cache=False)


def _pair(model: str, options: Mapping[str, Any], text: Input, pixels: Input) -> Size:
    results = ("text_embeds", "image_embeds")
    given = (text, pixels)
    return configured("transformers", f"{model}Model", f"{model}Config", options, given, results)


def _speech(
    model: str, options: Mapping[str, Any], sound: Input, config: str, part: str = ""
) -> Size:
    return configured("transformers", model, config, options, (sound,), _HIDDEN, part=part)


PAIRS = (
    Entry(
        "CLIP ViT-B/32",
        "transformers",
        F16,
        151.277,
        _pair("CLIP", {}, tokens(32, 77, 49408), Input("pixel_values", (32, 3, 224, 224))),
        _pair(
            "CLIP",
            {
                "text_config": {**_SMALL, "eos_token_id": 99, "bos_token_id": 0, "pad_token_id": 1},
                "vision_config": _SEEN,
                "projection_dim": 32,
            },
            tokens(2, 16, 100),
            Input("pixel_values", (2, 3, 32, 32)),
        ),
    ),
    Entry(
        "SigLIP-B/16",
        "transformers",
        F16,
        203.156,
        _pair("Siglip", {}, tokens(32, 64, 32000), Input("pixel_values", (32, 3, 224, 224))),
        _pair(
            "Siglip",
            {"text_config": _SMALL, "vision_config": _SEEN},
            tokens(2, 16, 100),
            Input("pixel_values", (2, 3, 32, 32)),
        ),
    ),
)

TEXT = (
    Entry(
        "BERT-base",
        "transformers",
        F16,
        109.514,
        _text("BertForMaskedLM", {}, tokens(8, 512, 30522)),
        _text("BertForMaskedLM", _SMALL, tokens(2, 16, 100)),
    ),
    Entry(
        "ModernBERT-base",
        "transformers",
        BF16,
        149.655,
        _text("ModernBertForMaskedLM", {}, tokens(8, 1024, 50280)),
        _text(
            "ModernBertForMaskedLM",
            {
                **{**_SMALL, "num_hidden_layers": 3, "local_attention": 8, "pad_token_id": 1},
                **{"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3},
            },
            tokens(2, 16, 100),
        ),
    ),
    Entry(
        "T5-base encoder",
        "transformers",
        BF16,
        109.629,
        _text(
            "T5EncoderModel",
            {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
            tokens(8, 512, 32100),
            _HIDDEN,
            "T5Config",
        ),
        _text(
            "T5EncoderModel",
            {
                **{"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
                **{"vocab_size": 100},
            },
            tokens(2, 16, 100),
            _HIDDEN,
            "T5Config",
        ),
    ),
    Entry(
        "Llama-3-8B, 4 layers",
        "transformers",
        BF16,
        1923.125,
        _causal(
            "Llama",
            {
                **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336},
                **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 4},
                **{"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
            },
            tokens(1, 2048, 128000),
        ),
        _causal("Llama", _GROUPED, tokens(2, 16, 100)),
        cut="4 of 32 layers",
    ),
    Entry(
        "Qwen3-0.6B",
        "transformers",
        BF16,
        596.050,
        _causal(
            "Qwen3",
            {
                **{"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072},
                **{"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 28},
                **{"head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1e6},
                **{"tie_word_embeddings": True},
            },
            tokens(1, 2048, 151643),
        ),
        _causal("Qwen3", {**_GROUPED, "head_dim": 8}, tokens(2, 16, 100)),
    ),
    Entry(
        "Gemma-3-1B",
        "transformers",
        BF16,
        999.886,
        _causal(
            "Gemma3",
            {
                **{"vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912},
                **{"num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 26},
                **{"head_dim": 256, "sliding_window": 512},
            },
            tokens(1, 2048, 262144),
            "Gemma3TextConfig",
        ),
        _causal(
            "Gemma3",
            {**_GROUPED, "head_dim": 8, "sliding_window": 8, "num_hidden_layers": 6},
            tokens(2, 16, 100),
            "Gemma3TextConfig",
        ),
    ),
    Entry(
        "Mamba-2-130M, 4 layers",
        "transformers",
        BF16,
        53.683,
        _text(
            "Mamba2Model",
            {
                **{"vocab_size": 50288, "hidden_size": 768, "state_size": 128, "n_groups": 1},
                **{"num_heads": 24, "head_dim": 64, "expand": 2, "num_hidden_layers": 4},
            },
            tokens(1, 1024, 50277),
            _HIDDEN,
            use_cache=False,
        ),
        _text(
            "Mamba2Model",
            {
                **{"vocab_size": 100, "hidden_size": 32, "state_size": 16, "n_groups": 1},
                **{"num_heads": 4, "head_dim": 16, "expand": 2, "num_hidden_layers": 2},
                **{"chunk_size": 8},
            },
            tokens(2, 16, 100),
            _HIDDEN,
            use_cache=False,
        ),
        cut="4 of 24 layers, by the plain torch path of the scan",
    ),
)

SPEECH = (
    Entry(
        "Whisper-small encoder",
        "transformers",
        F16,
        88.154,
        _speech(
            "WhisperModel",
            {
                **{"d_model": 768, "encoder_layers": 12, "encoder_attention_heads": 12},
                **{"encoder_ffn_dim": 3072, "decoder_layers": 1},
            },
            Input("input_features", (4, 80, 3000)),
            "WhisperConfig",
            "encoder",
        ),
        _speech(
            "WhisperModel",
            {
                **{"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4},
                **{"encoder_ffn_dim": 64, "decoder_layers": 1, "decoder_ffn_dim": 64},
                **{"decoder_attention_heads": 4, "vocab_size": 100, "max_source_positions": 32},
                **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
                **{"decoder_start_token_id": 1},
            },
            Input("input_features", (2, 80, 64)),
            "WhisperConfig",
            "encoder",
        ),
    ),
    Entry(
        "Wav2Vec2-base",
        "transformers",
        F16,
        94.372,
        _speech("Wav2Vec2Model", {}, Input("input_values", (4, 160000)), "Wav2Vec2Config"),
        _speech(
            "Wav2Vec2Model",
            {
                **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
                **{"num_attention_heads": 4, "conv_dim": [16] * 7},
                **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
            },
            Input("input_values", (2, 4000)),
            "Wav2Vec2Config",
        ),
    ),
)
