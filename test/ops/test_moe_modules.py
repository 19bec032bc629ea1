"""The modules of a mixture of experts have parameters, results and gradients of those of transformers."""

import pytest
import torch
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen2MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from liger_like import load_balancing_loss, nn

H, I, E, K = 16, 24, 8, 2
SIZES = {
    "hidden_size": H, "intermediate_size": I, "moe_intermediate_size": I, "num_local_experts": E, "num_experts": E,
    "num_experts_per_tok": K, "num_attention_heads": 2, "experts_implementation": "eager",
}  # fmt: skip
DEEPSEEK = {"n_routed_experts": E, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}


def mixtral():
    return nn.MoE(nn.Router(H, E, K), nn.Experts(E, H, I))


def deepseek():
    router = nn.Router(
        H, E, K, score="sigmoid", eps=1e-20, scale=2.5, groups=(4, 2, "top2"), correction=True, fp32=True
    )
    return nn.MoE(router, nn.Experts(E, H, I), shared_experts=nn.SwiGLUMLP(H, 2 * I))


def qwen():
    return nn.MoE(
        nn.Router(H, E, K, normalize=False),
        nn.Experts(E, H, I),
        shared_expert=nn.SwiGLUMLP(H, 40),
        shared_expert_gate=torch.nn.Linear(H, 1, bias=False),
    )


def gpt_oss():
    return nn.Experts(E, H, I, limit=7.0, alpha=1.702, transposed=True, interleaved=True, bias=True)


# ours, and theirs
BLOCKS = {
    "Mixtral": (mixtral, lambda: MixtralSparseMoeBlock(MixtralConfig(**SIZES))),
    "DeepSeek-V3": (deepseek, lambda: DeepseekV3MoE(DeepseekV3Config(**SIZES, **DEEPSEEK))),
    "Qwen2-MoE": (qwen, lambda: Qwen2MoeSparseMoeBlock(Qwen2MoeConfig(**SIZES, shared_expert_intermediate_size=40))),
}
EXPERTS = {
    "Mixtral": (lambda: nn.Experts(E, H, I), lambda: MixtralExperts(MixtralConfig(**SIZES))),
    "GPT-OSS": (gpt_oss, lambda: GptOssExperts(GptOssConfig(**SIZES))),
}


def compare(pair, device, *args):
    """Load the values of ours into theirs, which has the same names, and compare output and gradients."""
    ours, theirs = (make().to(device) for make in pair)
    for correction in ours.buffers():
        correction.normal_()
    theirs.load_state_dict(ours.state_dict())
    x, results = args[0], []
    for module in (ours, theirs):
        leaves = {"x": x.clone().requires_grad_(), **dict(module.named_parameters())}
        out = module(leaves["x"], *args[1:])
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(device)
        grads = torch.autograd.grad(out, [*leaves.values()], upstream)
        results.append({"out": out, **dict(zip(leaves, grads, strict=True))})
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_transformers(name, device):
    compare(BLOCKS[name], device, torch.randn(2, 9, H, device=device))


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_transformers(name, device):
    index = torch.rand(30, E, device=device).topk(K).indices
    compare(EXPERTS[name], device, torch.randn(30, H, device=device), index, torch.rand(30, K, device=device))


def test_initial_values(device):
    """They are those of a linear layer with as many inputs."""
    experts, router = nn.Experts(2, 100, 400, bias=True), nn.Router(100, 40, 2, bias=True, correction=True)
    for parameter in (experts.gate_up_proj, experts.gate_up_proj_bias, router.weight, router.bias):
        assert 0.09 < parameter.abs().max() <= 0.1
    for parameter in (experts.down_proj, experts.down_proj_bias):
        assert 0.045 < parameter.abs().max() <= 0.05
    assert not router.e_score_correction_bias.any()
    assert "e_score_correction_bias" not in dict(router.named_parameters())


def test_dtypes_of_a_router(device):
    x = torch.randn(5, H, device=device).half()
    for options, dtype in (({}, torch.float16), ({"fp32": True}, torch.float32)):
        logits, weights, _ = nn.Router(H, E, K, bias=True, **options).to(device).half()(x)
        assert (logits.dtype, weights.dtype) == (dtype, torch.float32)
    assert nn.Router(H, E, K).to(device)(x)[0].dtype == torch.float32


def test_a_router_in_fp32_stays_so_under_autocast(device):
    router, x = nn.Router(32, 8, 2, fp32=True).to(device), torch.randn(20, 32, device=device)
    with torch.autocast(device, torch.bfloat16):
        logits, *_ = router(x)
    assert torch.equal(logits, router(x)[0])


def test_loss_of_the_logits_that_hooks_collect(device):
    logits = []
    model = torch.nn.Sequential(mixtral(), mixtral()).to(device)
    for block in model:
        block.gate.register_forward_hook(lambda module, args, outputs: logits.append(outputs[0]))
    model(torch.randn(2, 9, H, device=device))
    mask = torch.ones(2, 9, dtype=torch.int64, device=device)
    mask[0, :3] = 0
    expected = load_balancing_loss_func(tuple(t.reshape(-1, E) for t in logits), E, K, mask)
    torch.testing.assert_close(load_balancing_loss(logits, K, mask=mask), expected)


def test_shared_experts_run_before_the_others(device):
    """A checkpoint then stops before the experts' second product."""
    order, block = [], deepseek().to(device)
    for name in ("experts", "shared_experts"):
        getattr(block, name).register_forward_pre_hook(lambda module, args, name=name: order.append(name))
    block(torch.randn(3, H, device=device))
    assert order == ["shared_experts", "experts"]


def test_repr():
    text = repr(deepseek())
    assert "(8, 16), top_k=2, score='sigmoid', normalize=True, eps=1e-20, scale=2.5, groups=(4, 2, 'top2')" in text
    assert "(8, 48, 16), bias=False, act='silu'" in text


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "top_k must be at most the 8 experts, got 9", lambda: nn.Router(H, E, 9)),
        (ValueError, "bias must be one of False, True", lambda: nn.Router(H, E, K, bias=torch.zeros(E))),
        (ValueError, "alpha needs act='silu'", lambda: nn.Experts(E, H, I, alpha=1.702, act="gelu")),
        (ValueError, "limit must be positive", lambda: nn.Experts(E, H, I, limit=0)),
        (ValueError, "same number of experts, got 8 and 7", lambda: nn.MoE(nn.Router(H, E, K), nn.Experts(7, H, I))),
        (ValueError, "shared_expert_gate come together", lambda:
            nn.MoE(nn.Router(H, E, K), nn.Experts(E, H, I), shared_expert=nn.SwiGLUMLP(H, I))),
        (TypeError, "experts must be a Experts, got Router", lambda: nn.MoE(nn.Router(H, E, K), nn.Router(H, E, K))),
    ],
)  # fmt: skip
def test_error_names_the_argument(error, message, call):
    with pytest.raises(error, match=message):
        call()
