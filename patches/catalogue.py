"""All recognisers, in the order in which they are tried."""

from liger_like.patches import Recogniser, attention
from liger_like.patches.experts import Experts
from liger_like.patches.glu_mlp import GLUMLP
from liger_like.patches.layer_norm import LayerNorm
from liger_like.patches.lm_head import LMHead
from liger_like.patches.lora import LoRA
from liger_like.patches.own_experts import OwnExperts
from liger_like.patches.qk_norm_rope import QKNormRope
from liger_like.patches.rms_norm import RMSNorm
from liger_like.patches.rope import Rope
from liger_like.patches.routers import Router
from liger_like.patches.separate_experts import SeparateExperts

ATTENTION, EXPERTS = attention.Attention(), Experts()
INTERFACES: tuple[Recogniser, ...] = (EXPERTS, ATTENTION)
# The first recogniser that matches a module patches it. patches.add_rms_norm is left out: no measurement shows that it
# makes a whole model faster.
RECOGNISERS: dict[str, Recogniser] = {
    recogniser.pattern: recogniser
    for recogniser in (
        *(RMSNorm(), LayerNorm(), QKNormRope(), Rope()),
        *(OwnExperts(), SeparateExperts(), GLUMLP(), Router(), LMHead(), LoRA()),
    )
}
