"""transformers' models, tiny and random: full attention where the budget allows, explicit masks where not."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import levattention as la
from levattention.integrations.huggingface import attention_modules, use_full_attention, use_lev_attention

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
PICTURE = {**SMALL, "image_size": 32, "patch_size": 8}
TEXT = {**SMALL, "vocab_size": 50, "max_position_embeddings": 64}
GROUPED = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 49}


def build(name):
    torch.manual_seed(0)
    t = transformers
    made = {
        "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**PICTURE)),
        "deit": lambda: t.DeiTForImageClassification(t.DeiTConfig(**PICTURE)),
        "dinov2": lambda: t.Dinov2ForImageClassification(t.Dinov2Config(**PICTURE)),
        "bert": lambda: t.BertForSequenceClassification(t.BertConfig(**TEXT)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**GROUPED)),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**GROUPED)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**GROUPED, head_dim=8)),
    }
    model = made[name]()
    # Random initial weights are so small that attention is uniform; let it be sharp. Tokens that start at zero have
    # keys of leverage 0, which no eps keeps although softmax would weigh them e⁰.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
            elif not parameter.any():
                parameter.normal_()
    return model.eval()


PICTURES, TEXTS, DECODERS = ["vit", "deit", "dinov2"], ["bert", "llama", "qwen2", "qwen3"], ["llama", "qwen2", "qwen3"]


def batch(name, padding="none"):
    generator = torch.Generator().manual_seed(1)
    if name in PICTURES:
        return {"pixel_values": torch.randn(3, 3, 32, 32, generator=generator)}
    ids = torch.randint(2, 49, (3, 40), generator=generator)
    mask = torch.ones_like(ids)
    if padding == "right":
        mask[0, 25:], mask[1, 18:] = 0, 0
    if padding == "left":
        mask[0, :3], mask[1, :5] = 0, 0
    return {"input_ids": ids, **({} if padding == "none" else {"attention_mask": mask})}


def logits(model, inputs):
    with torch.no_grad():
        out = model(**inputs).logits
    seen = inputs.get("attention_mask")
    return out if seen is None or out.ndim == 2 else out[seen.bool()]


CASES = [(name, "none") for name in PICTURES] + [(name, p) for name in TEXTS for p in ("none", "right", "left")]


@pytest.mark.parametrize(("name", "padding"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_enough_keys_is_sdpa(name, padding, dtype):
    model, inputs = build(name).to(dtype), batch(name, padding)
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    want = logits(model, inputs)
    got = logits(use_lev_attention(model, top_k=64), inputs)
    tight = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(got, want, **tight)
    # With all keys by eps the package's own arithmetic runs instead of PyTorch's.
    torch.testing.assert_close(
        logits(use_lev_attention(model, top_k=None, eps=1e-12, chunk=6), inputs), want,
        **({"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.2, "atol": 0.2}),
    )  # fmt: skip
    assert torch.equal(logits(use_full_attention(model), inputs), want)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_few_keys_equal_the_same_model_with_an_explicit_mask(name, padding, monkeypatch):
    """SDPA, called by transformers itself, with a mask that is built here from SVD leverage scores."""
    import dense
    from test_causal import causal_weights

    model, inputs = build(name), batch(name, padding)
    got = logits(use_lev_attention(model, top_k=4, chunk=16, window=1), inputs)
    use_full_attention(model)
    causal, calls = name in DECODERS, []

    def masked(query, key, value, attn_mask=None, dropout_p=0.0, scale=None, is_causal=False, **rest):
        groups = query.shape[1] // key.shape[1]
        padded = inputs.get("attention_mask")
        n = key.shape[-2]
        seen = torch.ones(3, n, dtype=torch.bool) if padded is None else padded.bool()
        seen = seen[:, None].expand(3, key.shape[1], n)
        if causal:
            weights, _ = causal_weights(key.double(), seen, n, 16, 1, top_k=4)
        else:
            weights = torch.zeros(3, key.shape[1], n, n, dtype=torch.float64)
            for i in range(3):
                for j in range(key.shape[1]):
                    kept = dense.top_leverage(key[i, j].double(), seen[i, j], 4, rtol=4 * 2.0**-23)
                    weights[i, j, :, kept] = 1
            weights = torch.where(dense.local(n, n, 1), 1.0, weights) * seen.unsqueeze(-2)
        calls.append(n)
        mask = weights.bool().repeat_interleave(groups, 1)
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", masked)
    want = logits(model, inputs)
    assert len(calls) == 2
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["vit", "bert", "llama"])
@pytest.mark.parametrize("top_k", [4, 64])
def test_gradient_checkpointing_changes_nothing(name, top_k):
    gradients = []
    for checkpointed in (False, True):
        model = use_lev_attention(build(name), top_k=top_k, chunk=8).double().train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        for module in attention_modules(model):
            if hasattr(module, "dropout") and isinstance(module.dropout, torch.nn.Module):
                module.dropout.p = 0.0
        inputs = batch(name, "right")
        inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
        model(**inputs).logits.square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) > 10
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("name", "padding"), [("llama", "none"), ("llama", "left"), ("qwen2", "left"), ("qwen3", "left")]
)
def test_generate(name, padding):
    model, inputs = build(name), batch(name, padding)
    options = {"max_new_tokens": 4, "do_sample": False, "min_new_tokens": 4}
    want = model.generate(**inputs, **options)
    assert torch.equal(use_lev_attention(model, top_k=64).generate(**inputs, **options), want)
    few = use_lev_attention(model, top_k=3, window=2, chunk=4)
    cached = few.generate(**inputs, **options)
    assert cached.shape == want.shape
    # A step of decoding sees the keys of the cache; the first token comes from the prefill, which both share.
    afresh = few.generate(**inputs, **options, use_cache=False)
    assert torch.equal(cached[:, :41], afresh[:, :41])


def test_a_step_of_decoding_sees_the_universal_set_of_the_cache():
    model, ids = use_lev_attention(build("llama"), top_k=5), batch("llama")["input_ids"]
    seen = []
    original = la.attention.Head.causal

    def spy(self, *args):
        part, sets = original(self, *args)
        seen.append((self.k.shape[-2], self.queries.shape[-2], sets))
        return part, sets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("levattention.head.Head.causal", spy)
        model.generate(ids, max_new_tokens=2, do_sample=False)
    n, m, sets = seen[-1]
    assert (n, m) == (41, 1)
    assert sets[-1].valid.all()
    assert sets[-1].index.max() < 40


def test_two_models_differ_and_layers_have_their_own_options():
    inputs = batch("vit")
    one, two, plain = build("vit"), build("vit"), build("vit")
    use_lev_attention(one, top_k=3)
    use_lev_attention(two, top_k=64)
    assert not torch.allclose(logits(one, inputs), logits(two, inputs))
    torch.testing.assert_close(logits(two, inputs), logits(plain, inputs))
    use_lev_attention(one, top_k=3, layers={0: None, 1: None})
    torch.testing.assert_close(logits(one, inputs), logits(plain, inputs))
    use_lev_attention(one, top_k=64, layers={1: {"top_k": 3}})
    use_lev_attention(two, top_k=3, layers={0: None})
    torch.testing.assert_close(logits(one, inputs), logits(two, inputs))
    assert not torch.allclose(logits(one, inputs), logits(plain, inputs))
    use_lev_attention(one, top_k=3, layers={0: {"eps": 1e-9}, 1: None})
    torch.testing.assert_close(logits(one, inputs), logits(plain, inputs), rtol=1e-4, atol=1e-4)


def test_options_are_no_part_of_what_is_saved(tmp_path):
    model, inputs = build("vit"), batch("vit")
    want = logits(model, inputs)
    use_lev_attention(model, top_k=3).save_pretrained(tmp_path)
    again = transformers.ViTForImageClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(again, inputs), want)


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("additive", [False, True])
def test_a_users_own_mask_is_read_where_it_is_padding_or_causal(name, additive):
    model, inputs = build(name), batch(name)
    seen = torch.ones(3, 1, 40, 40, dtype=torch.bool)
    seen[0, ..., 14:] = False
    if name == "llama":
        seen = seen.tril()
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min) if additive else seen
    inputs["attention_mask"] = mask
    with torch.no_grad():
        want = model(**inputs).logits
        got = use_lev_attention(model, top_k=64)(**inputs).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["sliding", "block", "bias"])
def test_masks_without_a_meaning_here_are_refused(kind):
    model, inputs = use_lev_attention(build("bert"), top_k=4), batch("bert")
    places = torch.arange(40)
    mask = {
        "sliding": (places[:, None] - places).abs() < 4,
        "block": places[:, None] // 7 == places // 7,
        "bias": -(places[:, None] - places).abs().float(),
    }[kind]
    inputs["attention_mask"] = mask.expand(3, 1, 40, 40)
    with pytest.raises(ValueError, match="attention_mask: expected"):
        model(**inputs)


def test_a_sliding_window_is_refused_once_it_hides_keys():
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    model = transformers.Qwen2ForCausalLM(config).eval()
    short, long = torch.randint(2, 49, (2, 7)), torch.randint(2, 49, (2, 20))
    with torch.no_grad():
        want = model(short).logits
    use_lev_attention(model, top_k=64)
    torch.testing.assert_close(model(short).logits, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="a sliding window"):
        model(long)


def test_a_static_cache_is_refused_at_prefill():
    model, ids = use_lev_attention(build("llama"), top_k=4), batch("llama")["input_ids"]
    with pytest.raises(ValueError, match="a static cache"):
        model.generate(ids, max_new_tokens=4, cache_implementation="static", disable_compile=True)


def test_bad_input():
    with pytest.raises(ValueError, match="Linear has no attention"):
        use_lev_attention(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"layers 0 to 1, got \[5\]"):
        use_lev_attention(build("vit"), layers={5: None})
    with pytest.raises(ValueError, match=r"options among .* got \['topk'\]"):
        use_lev_attention(build("vit"), layers={0: {"topk": 3}})
    with pytest.raises(ValueError, match="positive integer, got 0"):
        use_lev_attention(build("vit"), top_k=0)
    with pytest.raises(ValueError, match="causal attention takes Drop"):
        use_lev_attention(build("llama"), residual=la.residuals.Cluster())
    model = build("vit")
    use_lev_attention(build("vit"))
    model.set_attn_implementation("levattention")
    with pytest.raises(ValueError, match="call use_lev_attention"):
        model(**batch("vit"))
    assert use_full_attention(build("vit")).config._attn_implementation == "sdpa"


def test_importing_the_package_does_not_import_transformers():
    script = (
        "import sys, levattention as la; la.attend, la.LevAttention, la.integrations, la.residuals, la.vision;"
        "print('transformers' in sys.modules or 'PIL' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
