"""Which attention classes cache latents: by the form of their source."""

from torch import nn

from liger_like.patches import latents


class Known(nn.Module):
    """Attention with the form of the families."""

    def expand_kv(self, latent, rotated):
        nope, width = self.qk_nope_head_dim, self.v_head_dim
        made = self.kv_b_proj(latent).unflatten(-1, (-1, nope + width))[:, 0].transpose(1, 2)
        keys = made.new_empty(*made.shape[:-1], nope + self.qk_rope_head_dim)
        keys[..., :nope], keys[..., nope:] = made[..., :nope], rotated
        return keys, made[..., nope:]

    def forward(self, x, cache, attention_interface):
        k, v = self.expand_kv(x, x)
        return attention_interface(self, x, k, v, None)


class OtherValues(Known):
    def expand_kv(self, latent, rotated):
        keys, values = super().expand_kv(latent, rotated)
        self.kv_b_proj, self.qk_nope_head_dim, self.v_head_dim, self.qk_rope_head_dim  # noqa: B018
        return keys, values * 1.001


class CachedKeys(Known):
    def forward(self, x, cache, attention_interface):
        k, v = self.expand_kv(x, x)
        k, v = cache.update(k, v)
        return attention_interface(self, x, k, v, None)


class ReadKeys(Known):
    def forward(self, x, cache, attention_interface):
        k, v = self.expand_kv(x, x)
        return attention_interface(self, x, k, v, k.shape[2])


class Swapped(Known):
    def forward(self, x, cache, attention_interface):
        k, v = self.expand_kv(x, x)
        return attention_interface(self, x, v, k, None)


def test_recognition():
    found = {cls: latents.has_latents(cls) for cls in (Known, OtherValues, CachedKeys, ReadKeys, Swapped, nn.Linear)}
    assert found == {Known: True, **dict.fromkeys((OtherValues, CachedKeys, ReadKeys, Swapped, nn.Linear), False)}
