"""Models that see, against transformers' own: logits, tokens, files; ids of images; what is refused."""

from __future__ import annotations

import copy
import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor
from vision_models import SIDE, TILE_TOKENS, PlainSeeing, picture, save_seeing_model

from arpo.builtin.model import build_tokenizer
from arpo.config.schema import Model, Train
from arpo.data.images import open_image
from arpo.errors import ArpoError
from arpo.models import vision
from arpo.models.load import load_model, load_trainable
from arpo.models.save import save_merged, save_pretrained
from arpo.models.vision import VisionTower, vision_tower
from arpo.types import Image


def load(directory: Path) -> tuple[Any, Any, VisionTower]:
    model, tokenizer = load_model(Model(path=str(directory), device="cpu"))
    tower = vision_tower(model)
    assert tower is not None
    return model, tokenizer, tower


@pytest.fixture(scope="module")
def words() -> Any:
    return build_tokenizer(["What is in the picture? A cat and a dog."])


@pytest.fixture(scope="module")
def split_dir(words: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_model(tmp_path_factory.mktemp("split"), words, split=True)


@pytest.fixture(scope="module")
def whole_dir(words: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_model(tmp_path_factory.mktemp("whole"), words)


PICTURES = (picture(1, 9, 5), picture(2, 5, 9), picture(3, 30, 6))


def our_logits(model: Any, ids: tuple[int, ...]) -> torch.Tensor:
    tower = vision_tower(model)
    assert tower is not None
    with torch.no_grad():
        rows = tower.embed(torch.tensor(ids), model.get_input_embeddings())
        return model(inputs_embeds=rows[None]).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["idefics3", "smolvlm"])
@pytest.mark.parametrize(("split", "tied"), [(False, True), (True, False)])
def test_logits_are_those_of_transformers(kind: str, split: bool, tied: bool, words: Any, tmp_path: Path) -> None:
    save_seeing_model(tmp_path, words, kind, split=split, tied=tied)
    model, tokenizer, tower = load(tmp_path)
    tokens = [5, 6]
    for image in PICTURES:
        tokens += [*tower.expand(tokenizer, image), 7]
    plain = PlainSeeing(tmp_path)
    with torch.no_grad():
        expected = plain.full(input_ids=torch.tensor([tokens]), **plain.pixels(PICTURES)).logits[0]
    found = our_logits(model, tower.embed_ids(tokens, PICTURES))
    assert torch.allclose(found, expected, atol=1e-5)
    assert (found - our_logits(model, tower.embed_ids(tokens, PICTURES[::-1][1:] + PICTURES[:1]))).abs().max() > 1e-2
    assert (
        type(model).__name__ == "LlamaForCausalLM" and (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    )
    assert not any("vision" in name or "connector" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("split", [False, True])
def test_an_image_becomes_the_tokens_of_the_models_own_processor(
    split: bool, split_dir: Path, whole_dir: Path, tmp_path: Path
) -> None:
    directory = split_dir if split else whole_dir
    _, tokenizer, tower = load(directory)
    shutil.copytree(directory, tmp_path / "copy")
    settings = {"processor_class": "Idefics3Processor", "image_seq_len": TILE_TOKENS}
    (tmp_path / "copy" / "processor_config.json").write_text(json.dumps(settings))
    processor = AutoProcessor.from_pretrained(tmp_path / "copy")
    for image in (*PICTURES, picture(4, 1, 50), picture(5, 17, 16)):
        given = processor(text="A<image>B", images=[[open_image(image)]])
        before, after = (tokenizer(text, add_special_tokens=False).input_ids for text in "AB")
        assert [*before, *tower.expand(tokenizer, image), *after] == given["input_ids"][0]
    assert len(tower.expand(tokenizer, PICTURES[0])) > 3 * TILE_TOKENS or not split


def test_every_image_has_ids_of_its_own_and_only_nodes_have_images(whole_dir: Path) -> None:
    _, tokenizer, tower = load(whole_dir)
    one, other = picture(1), picture(2)
    tokens = tower.expand(tokenizer, one)
    assert tower.num_ids == tower.vocab_size and tower.embed_ids(tokens, ()) == tokens  # sampled: ordinary tokens
    first, second = tower.embed_ids(tokens, [one]), tower.embed_ids(tokens, [other])
    places = [i for i, token in enumerate(tokens) if token == tower.image_token_id]
    assert [first[i] for i in places] == [*range(tower.vocab_size, tower.vocab_size + TILE_TOKENS)]
    assert [second[i] for i in places] == [*range(tower.vocab_size + TILE_TOKENS, tower.num_ids)]
    assert [t for i, t in enumerate(first) if i not in places] == [t for i, t in enumerate(tokens) if i not in places]
    assert tower.embed_ids(tokens, [Image(one.sha256, 6, 6)]) == first
    assert tower.embed_ids((*tokens, *tokens), [other, one]) == (*second, *first)
    with pytest.raises(ValueError, match="4 image tokens for 2 images of 8 tokens"):
        tower.embed_ids(tokens, [one, other])
    with pytest.raises(ArpoError, match="known only by its hash"):
        tower.embed_ids(tokens, [Image("0" * 64, 6, 6)])


def test_features_are_computed_once_and_again_after_eviction(whole_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, tower = load(whole_dir)
    encoded: list[str] = []
    encode = tower.encode
    monkeypatch.setattr(tower, "encode", lambda image: encoded.append(image.sha256) or encode(image))
    images = [picture(seed) for seed in range(3)]
    ids = [tower.embed_ids(tower.expand(tokenizer, image), [image]) for image in images]
    together = our_logits(model, (*ids[0], *ids[1], *ids[2]))
    assert torch.equal(our_logits(model, (*ids[0], *ids[1], *ids[2])), together)
    assert encoded == [image.sha256 for image in images]
    tower._features = vision._Recent(1)  # room for one
    assert torch.equal(our_logits(model, (*ids[0], *ids[1], *ids[2])), together)
    assert torch.equal(our_logits(model, (*ids[0], *ids[1], *ids[2])), together)
    assert len(encoded) == 9  # each of them again, each time
    with torch.inference_mode():  # as in the engine; the trainer may need them later
        alone = torch.cat([tower.encode(image).clone() for image in images])
        assert not any(tower.encode(image).is_inference() for image in images)
        rows = tower.embed(torch.tensor([t for part in ids for t in part]), model.get_input_embeddings())
    places = torch.tensor([t >= tower.vocab_size for part in ids for t in part])
    assert torch.equal(rows[places], alone)


def test_images_that_nothing_holds_are_forgotten(whole_dir: Path) -> None:
    _, tokenizer, tower = load(whole_dir)
    tower._kept.limit = 1  # room for one
    held, dropped = picture(1), picture(2)
    ids = [tower.embed_ids(tower.expand(tokenizer, image), [image]) for image in (held, dropped)]
    tower.embed_ids(tower.expand(tokenizer, held), [held])
    assert copy.deepcopy(tower) is tower  # a copy of the model has the same ids
    name = dropped.sha256
    del dropped
    gc.collect()
    assert len(tower._known[held.sha256].held) == 1 and not tower._known[name].held
    again = picture(2)
    assert tower.embed_ids(tower.expand(tokenizer, again), [again]) == ids[1]  # under the same ids


def test_what_is_known_of_images_does_not_grow_forever(whole_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "FORGET_AT", 8)
    model, tokenizer, tower = load(whole_dir)
    tower._kept.limit = 1  # room for one
    held, seen = picture(0), picture(1)
    first, second = (tower.embed_ids(tower.expand(tokenizer, image), [image]) for image in (held, seen))
    features = tower.embed(torch.tensor(second), model.get_input_embeddings())
    given = {*first, *second}
    del seen
    for seed in range(2, 40):
        dropped = picture(seed)
        ids = tower.embed_ids(tower.expand(tokenizer, dropped), [dropped])
        assert not given & {number for number in ids if number >= tower.vocab_size}  # no id is given twice
        given |= {*ids}
    assert len(tower._known) == len(tower._names) == len(tower._firsts) <= 8
    assert tower.embed_ids(tower.expand(tokenizer, held), [held]) == first
    assert torch.equal(tower.embed(torch.tensor(second), model.get_input_embeddings()), features)  # they are kept
    rows = tower.embed(torch.tensor(first), model.get_input_embeddings())
    places = torch.tensor(first) >= tower.vocab_size
    assert torch.equal(rows[places], tower.encode(held))
    forgotten = next(number for number in sorted(given) if number > max(*first, *second))
    with pytest.raises(RuntimeError, match="forgotten"):
        tower.embed(torch.tensor([forgotten]), model.get_input_embeddings())


def test_a_saved_model_is_whole_again(split_dir: Path, tmp_path: Path) -> None:
    model, tokenizer, tower = load(split_dir)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 1.0  # as trained
    save_pretrained(model, tokenizer, tmp_path / "saved")
    before = AutoModelForImageTextToText.from_pretrained(split_dir).state_dict()
    after = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved").state_dict()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert before.keys() == after.keys() and changed == ["model.text_model.layers.0.mlp.up_proj.weight"]
    tokens = (5, *tower.expand(tokenizer, PICTURES[0]), 6)
    again, _, other = load(tmp_path / "saved")
    expected = our_logits(model, tower.embed_ids(tokens, PICTURES[:1]))
    assert torch.equal(our_logits(again, other.embed_ids(tokens, PICTURES[:1])), expected)
    for name in ("preprocessor_config.json", "generation_config.json"):
        assert json.loads((tmp_path / "saved" / name).read_text()) == json.loads((split_dir / name).read_text())


def test_an_adapter_is_merged_into_the_text_model(whole_dir: Path, tmp_path: Path) -> None:
    model, tokenizer = load_trainable(Model(path=str(whole_dir), device="cpu"), Train(lora_rank=2), 0)
    tower = vision_tower(model)
    assert tower is not None
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    ids = tower.embed_ids((5, *tower.expand(tokenizer, PICTURES[0])), PICTURES[:1])
    save_merged(model, tokenizer, tmp_path / "merged")
    merged, _, other = load(tmp_path / "merged")
    other.embed_ids(tower.expand(tokenizer, PICTURES[0]), PICTURES[:1])
    assert torch.allclose(our_logits(merged, ids), our_logits(model, ids), atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("qwen2_vl", "three dimensions"),
        ("qwen2_5_vl", "three dimensions"),
        ("qwen3_vl", "three dimensions"),
        ("gemma3", "both directions"),
        ("mllama", "cross-attention"),
        ("llava", "not laid out"),
        ("somevlm", "not laid out"),
    ],
)
def test_other_families_are_refused_by_name(kind: str, reason: str, whole_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(whole_dir, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": kind}))
    with pytest.raises(ArpoError, match=f"it is a '{kind}' model.*{reason}.*SmolVLM and Idefics3 are supported"):
        load_model(Model(path=str(tmp_path / "model"), device="cpu"))


def change_config(directory: Path, **values: Any) -> None:
    _update(directory / "config.json", values)


def change_vision(directory: Path, **values: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    _update(directory / "config.json", {"vision_config": {**config["vision_config"], **values}})


def change_processor(directory: Path, **values: Any) -> None:
    _update(directory / "preprocessor_config.json", values)


def _update(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("change", "values", "message"),
    [
        (change_config, {"scale_factor": 0}, "scale_factor = 0"),
        (change_config, {"scale_factor": "2"}, "scale_factor = '2'"),
        (change_config, {"image_token_id": 3}, "no token <image>"),
        (change_config, {"text_config": {"model_type": "mistral"}}, "only llama is supported"),
        (change_config, {"vision_config": 3}, "no text_config and vision_config"),
        (change_vision, {"image_size": 10**9}, "image_size = 1000000000"),
        (change_vision, {"image_size": SIDE + 1}, "does not divide"),
        (change_vision, {"patch_size": 0}, "patch_size = 0"),
        (change_vision, {"num_channels": 1}, "num_channels"),
        (change_vision, {"hidden_size": 10**9}, "hidden_size"),
        (change_vision, {"hidden_size": 512}, "hold only"),
        (change_processor, {"size": {"longest_edge": 10**9}}, "size = "),
        (change_processor, {"size": {"height": 10**6, "width": 10**6}}, "size = "),
        (change_processor, {"size": {"longest_edge": 4096}}, "tiles"),
        (change_processor, {"max_image_size": {"longest_edge": 10**6}}, "max_image_size"),
        (change_processor, {"do_resize": False}, "do_resize"),
        (change_processor, {"do_image_splitting": "yes"}, "do_image_splitting"),
        (change_processor, {"image_std": [0, 1, 1]}, "image_std"),
        (change_processor, {"image_mean": "none"}, "image_mean"),
        (change_processor, {"rescale_factor": None}, "rescale_factor"),
    ],
)
def test_sizes_that_do_not_belong_together_are_refused(
    change: Any, values: dict[str, Any], message: str, whole_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole_dir, tmp_path / "model")
    change(tmp_path / "model", **values)
    with pytest.raises(ArpoError) as error:
        load_model(Model(path=str(tmp_path / "model"), device="cpu"))
    assert message in str(error.value) and len(str(error.value)) < 1000


def test_a_directory_without_processor_or_with_a_loaded_model_is_refused(whole_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(whole_dir, tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").unlink()
    with pytest.raises(ArpoError, match=r"has no preprocessor_config\.json: copy it"):
        load_model(Model(path=str(tmp_path / "model"), device="cpu"))
    full = AutoModelForImageTextToText.from_pretrained(whole_dir)
    with pytest.raises(ArpoError, match="lacks its image processor"):
        load_model(Model(path="given:x", device="cpu"), (full, None))


def test_reasons_name_known_families_only() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert {name for name in vision.REFUSED if name not in CONFIG_MAPPING} == set()
