"""Vision-language models, with pixels as processors lay them out, and without."""

import copy

import pytest
import torch
import transformers
from tiny_models import CONFIG, assert_exact, random, rows

from liger_like.patching import patch

pytestmark = [pytest.mark.filterwarnings("error:liger_like"), pytest.mark.usefixtures("references")]

IMAGE, WORDS = 100, 90  # IMAGE: the id of a part of an image; ids of words are below WORDS
TEXT = CONFIG | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
QWEN = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": 99, "vision_start_token_id": 98, "vision_end_token_id": 97}
CONFIGS = {
    "Llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **ENCODER, "image_size": 8},
        "vision_feature_layer": -1,
        "image_token_index": IMAGE,
    },
    "InternVL": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**ENCODER, "image_size": [16, 16], "patch_size": [4, 4]},
        "image_token_id": IMAGE,
    },
    "Gemma3": {
        "text_config": {
            **TEXT,
            "num_hidden_layers": 2,
            "query_pre_attn_scalar": 9,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {"model_type": "siglip_vision_model", **ENCODER, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
    },
    "Qwen2_5_VL": {
        "text_config": TEXT | MROPE,
        "vision_config": {
            **QWEN,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        **QWEN_IDS,
    },
    "Qwen3VL": {
        "text_config": TEXT | MROPE,
        "vision_config": {
            **QWEN,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **QWEN_IDS,
    },
    "Mllama": {
        "text_config": {**TEXT, "num_hidden_layers": 2, "cross_attention_layers": [1]},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_global_layers": 1,
            "attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
            "max_num_tiles": 2,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
            "intermediate_layers_indices": [0],
            "vision_output_dim": 64,
        },
        "image_token_index": IMAGE,
    },
}


def tiny(family, device):
    """A model whose attention is SDPA's, as it is by default."""
    cls = getattr(transformers, f"{family}ForConditionalGeneration")
    model = random(cls(cls.config_class(**copy.deepcopy(CONFIGS[family]))), device)
    for name, parameter in model.named_parameters():
        # torch sums these gradients, and the sums cancel: a bias of keys adds the same to all scores of a query,
        # and a gate is one number. What is left is rounding
        cancels = ("vision" in name and name.endswith("k_proj.bias")) or parameter.numel() == 1
        parameter.requires_grad_(not cancels)
    return model


def on(device, inputs):
    return {name: t.to(device) for name, t in inputs.items()}


def words():
    """Two rows, of which one is padded on the left and one on the right."""
    ids = torch.randint(3, WORDS, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def with_pixels(*shape, places=((0, 3, 7), (1, 4, 8)), kinds=None, **more):
    """``words`` with images in these columns, said by a name of ``kinds``, too."""
    inputs = words()
    is_image = torch.zeros_like(inputs["input_ids"])
    for row, begin, end in places:
        is_image[row, begin:end] = 1
    inputs["input_ids"][is_image.bool()] = IMAGE
    inputs |= {"pixel_values": torch.randn(*shape), **more}
    return inputs if kinds is None else inputs | {kinds: is_image}


def with_tiles():
    """The first row sees both tiles of its image, the second has one; the words before an image see none."""
    tiles = torch.tensor([[1, 1], [1, 0]])
    seen = torch.ones(2, 12, 1, 1, dtype=torch.int64) * tiles[:, None, None]
    seen[:, :3] = 0
    pixels = torch.randn(2, 1, 2, 3, 8, 8) * tiles[:, None, :, None, None, None]
    inputs = with_pixels(0, places=((0, 3, 4), (1, 3, 4)), aspect_ratio_mask=tiles[:, None])
    return inputs | {
        "pixel_values": pixels,
        "aspect_ratio_ids": torch.tensor([[2], [1]]),
        "cross_attention_mask": seen,
    }


def with_patches():
    """Two images in the first row, of 4 by 4 and 2 by 4 patches."""
    grid, places = torch.tensor([[1, 4, 4], [1, 2, 4]]), ((0, 3, 7), (0, 9, 11))
    return with_pixels(24, 3 * 2 * 4 * 4, places=places, kinds="mm_token_type_ids", image_grid_thw=grid)


IMAGES = {
    "Llava": lambda: with_pixels(2, 3, 8, 8),
    "InternVL": lambda: with_pixels(1, 3, 16, 16, places=((1, 4, 8),)),
    "Gemma3": lambda: with_pixels(2, 3, 16, 16, kinds="token_type_ids"),
    "Qwen2_5_VL": with_patches,
    "Qwen3VL": with_patches,
    "Mllama": with_tiles,
}
# family: the patched classes of its vision part
SEEING = {
    "Llava": {"LayerNorm": {"layer_norm"}, "CLIPAttention": {"attention"}},
    "InternVL": {"LayerNorm": {"layer_norm"}, "InternVLVisionAttention": {"attention"}},
    "Gemma3": {"LayerNorm": {"layer_norm"}, "SiglipAttention": {"attention"}},
    "Qwen2_5_VL": {"Qwen2_5_VLMLP": {"glu_mlp"}, "Qwen2_5_VLVisionAttention": {"rope", "attention"}},
    "Qwen3VL": {"LayerNorm": {"layer_norm"}, "Qwen3VLVisionAttention": {"rope", "attention"}},
    "Mllama": {"LayerNorm": {"layer_norm"}, "MllamaVisionAttention": {"attention"}},
}
HEARING = {"rms_norm", "glu_mlp", "attention", "lm_head"}


def pair(family, device):
    """A patched model, its unpatched twin, and the report."""
    original = tiny(family, device)
    patched = copy.deepcopy(original)
    return patched, original, patch(patched, strict=True)


def labelled(inputs):
    """Return inputs with labels for words."""
    hidden = (inputs["attention_mask"] == 0) | (inputs["input_ids"] == IMAGE)
    return {**inputs, "labels": inputs["input_ids"].masked_fill(hidden, -100)}


@pytest.mark.parametrize("family", CONFIGS)
def test_models(family, device):
    patched, original, report = pair(family, device)
    assert {row.pattern for row in report.patched} >= HEARING
    for cls, patterns in SEEING[family].items():
        assert {row.pattern for row in report.patched if row.cls == cls} == patterns
    for make, sees in ((words, False), (IMAGES[family], True)):
        inputs = on(device, make())
        assert_exact(patched, original, labelled(inputs), k=2)
        assert any(p.grad is not None for p in eyes(patched)) == sees
    assert patched(**labelled(inputs)).logits is None
    with torch.no_grad():
        shown = inputs["attention_mask"].bool()
        models = patched, original, copy.deepcopy(original).double()
        got, same, exact = (model(**inputs).logits[shown] for model in models)
    assert (got - exact).norm() <= 2 * (same - exact).norm() + 1e-6 * exact.norm()


def eyes(model):
    """The parameters of what sees."""
    return [p for name, p in model.named_parameters() if "visi" in name or "visual" in name]


@pytest.mark.parametrize("family", ["Llava", "Gemma3", "Qwen2_5_VL", "Mllama"])
def test_generate(family, device):
    patched, original, _ = pair(family, device)
    inputs = on(device, IMAGES[family]())
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    got, expected = (model.eval().generate(**inputs, **options) for model in (patched, original))
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.logits, expected.logits)


@pytest.mark.parametrize("trained", ["multi_modal_projector", "language_model"])
def test_parts_that_are_frozen(trained, device):
    """Only what translates images into words is trained, or all but what sees."""
    patched, original, _ = pair("Llava", device)
    for model in (patched, original):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
    inputs = labelled(on(device, IMAGES["Llava"]()))
    assert_exact(patched, original, inputs, k=2)
    assert all((p.grad is not None) == (trained in name) for name, p in patched.named_parameters())


@pytest.mark.parametrize("bias", ["use_relative_position_bias", "use_shared_relative_position_bias"])
def test_attention_whose_masks_get_a_bias_is_left_alone(bias, device):
    """BEiT adds it to the mask that transformers made."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BeitConfig(**sizes, image_size=16, patch_size=4, **{bias: True})
    original = random(transformers.BeitModel(config), device)
    patched, images = copy.deepcopy(original), torch.randn(2, 3, 16, 16, device=device)
    assert {row.status for row in rows(patch(patched), "attention")} == {"skipped"}
    got, expected = (model.eval()(pixel_values=images).last_hidden_state for model in (patched, original))
    torch.testing.assert_close(got, expected)


def test_attention_whose_masks_are_looked_into_is_left_alone(device):
    """Siglip 2's head makes a mask of its own and repeats it for a torch.nn.MultiheadAttention."""
    sizes = {name: size for name, size in ENCODER.items() if name != "image_size"}
    config = transformers.Siglip2VisionConfig(**sizes, num_patches=16)
    inputs = {
        "pixel_values": torch.randn(2, 16, 3 * 4 * 4, device=device),
        "pixel_attention_mask": (torch.arange(16, device=device) < 12).long().expand(2, -1),
        "spatial_shapes": torch.tensor([[4, 3], [3, 4]], device=device),
    }
    for vision_use_head, status in ((True, "skipped"), (False, "patched")):
        config.vision_use_head = vision_use_head
        original = random(transformers.Siglip2VisionModel(config), device)
        patched = copy.deepcopy(original)
        (row,) = (row for row in rows(patch(patched), "attention") if row.cls == "Siglip2Attention")
        assert row.status == status
        if vision_use_head:
            assert "Siglip2MultiheadAttentionPoolingHead.forward uses a mask for more than passing it on" in row.reason
        got, expected = (model(**inputs).last_hidden_state[:, :12] for model in (patched, original))
        torch.testing.assert_close(got, expected)
