"""The tokenizer is tried at export with the runtime's class: what cannot serve the model is refused before a weight."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specrt.engines.errors import SourceError, SpecrtError, UnsupportedModelError
from specrt.exporter.export import export
from specrt.exporter.options import ExportOptions
from specrt.exporter.parity.reference import MIN_DISTINCT_IDS, reference_ids
from specrt.exporter.tokenizer import load_tokenizer, write_tokenizer
from specrt.runtime.text.codec import TextCodec
from tests.exports import Exports
from tests.progress import KeptProgress
from tests.tiny import BOS, CHAT_TEMPLATE, EOS, tiny_tokenizer

VOCAB_SIZE = 320
TEXT = "It isn't the dog's, it's 世界 ."


def fresh_tokenizer(**changes: Any) -> Any:
    """The tiny tokenizer, a new object, with other arguments."""
    backend = Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    given = {"bos_token": BOS, "eos_token": EOS, "chat_template": CHAT_TEMPLATE, **changes}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **given)


def written(tokenizer: Any, folder: Path, vocab_size: int = VOCAB_SIZE) -> tuple[Any, TextCodec, list[str]]:
    """(the bundle's entry, the runtime's codec of it, the notes)."""
    progress = KeptProgress()
    entry = write_tokenizer("model", tokenizer, folder, vocab_size, progress)
    return entry, TextCodec.from_bundle(folder, entry, vocab_size), progress.notes


@pytest.fixture(scope="module")
def model(exports: Exports) -> Path:
    return exports.model()


def copied(model: Path, folder: Path, *left_out: str) -> Path:
    return shutil.copytree(model, folder / "model", ignore=shutil.ignore_patterns(*left_out))


TOKENIZER_FILES = ("tokenizer*", "*.jinja")


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "bert"])
def test_a_folder_without_tokenizer_files_is_refused(model: Path, tmp_path: Path, model_type: str) -> None:
    """transformers invents a tokenizer of special tokens for some classes, and raises for others."""
    folder = copied(model, tmp_path, *TOKENIZER_FILES)
    config = (folder / "config.json").read_text().replace('"llama"', f'"{model_type}"')
    (folder / "config.json").write_text(config)
    with pytest.raises(
        SourceError, match=r"its tokenizer is missing: found .*, expected tokenizer\.json, .*; download"
    ):
        load_tokenizer(str(folder), str(folder), {})


def test_an_export_without_tokenizer_files_leaves_nothing(model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path, *TOKENIZER_FILES)
    with pytest.raises(SourceError, match="its tokenizer is missing"):
        export(ExportOptions(str(folder), tmp_path / "bundle"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_vocab_json_without_merges_is_refused(model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path, *TOKENIZER_FILES)
    (folder / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(SourceError, match=r"found vocab\.json without merges\.txt"):
        load_tokenizer(str(folder), str(folder), {})


def test_whole_files_are_loaded(model: Path) -> None:
    """The control of the refusals above."""
    assert len(load_tokenizer(str(model), str(model), {})) == VOCAB_SIZE


def test_a_table_with_fewer_ids_than_the_tokenizer_is_refused(tmp_path: Path) -> None:
    message = (
        r"^model: the tokenizer has 320 tokens, the model 318 ids; 2 tokens cannot be fed, the first is '.*' \(id 318\)"
    )
    with pytest.raises(SourceError, match=message):
        written(fresh_tokenizer(), tmp_path, 318)
    tokenizer = fresh_tokenizer()
    tokenizer.add_tokens(["<plain>"])
    with pytest.raises(SourceError, match=r"the first is '<plain>' \(id 320\)"):
        written(tokenizer, tmp_path / "added")


def test_special_tokens_may_have_no_row_unless_the_template_writes_them(tmp_path: Path) -> None:
    """As ``[PAD]`` has none in published models."""
    _, _, notes = written(fresh_tokenizer(pad_token="[PAD]"), tmp_path / "pad")
    assert ["1 tokens cannot be fed, the first is '[PAD]' (id 320)" in note for note in notes] == [True]
    tokenizer = fresh_tokenizer(pad_token="[PAD]", chat_template="{{ pad_token }}{{ messages[-1].content }}")
    with pytest.raises(SourceError, match=r"cannot read what its chat template writes: .*token 0 is 320"):
        written(tokenizer, tmp_path / "template")


def test_a_table_larger_than_the_tokenizer_is_reported(tmp_path: Path) -> None:
    _, codec, notes = written(fresh_tokenizer(), tmp_path / "padded", 448)
    assert notes == ["128 of the model's 448 ids have no token and so no text; sampling may draw them"]
    assert codec.encode([447]) == [447]
    assert written(fresh_tokenizer(), tmp_path / "whole")[2] == []


def word_pieces(clean_up: bool) -> Any:
    """A WordPiece tokenizer, as BERT-like causal models have; ``clean_up`` is what transformers adds to its decoder."""
    letters = sorted({*"it isn'tdog's,世界.?!ue:()=*/#\"0123456789abcdefghijklmnopqrstuvwxyzäïîêüß😀"} - {" "})
    vocab = ["[UNK]", "[CLS]", "[SEP]", "do", "##og", *letters, *(f"##{letter}" for letter in letters)]
    backend = Tokenizer(models.WordPiece({token: i for i, token in enumerate(vocab)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece("##", True)
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", cls_token="[CLS]", clean_up_tokenization_spaces=clean_up
    )


@pytest.mark.parametrize("clean_up", [False, True])
def test_a_word_piece_tokenizer_is_streamed_as_transformers_decodes_it(tmp_path: Path, clean_up: bool) -> None:
    tokenizer = word_pieces(clean_up)
    entry, codec, _ = written(tokenizer, tmp_path, len(tokenizer))
    ids = codec.encode(TEXT)
    stream = codec.stream()
    streamed = "".join([*map(stream.push, ids), stream.flush()])
    assert entry.clean_up_spaces == clean_up
    assert streamed == codec.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)
    assert (" 's" in streamed, "isn't" in streamed) == (False, clean_up)


def test_clean_up_is_not_applied_to_bpe(tmp_path: Path) -> None:
    entry, codec, _ = written(fresh_tokenizer(clean_up_tokenization_spaces=True), tmp_path)
    assert not entry.clean_up_spaces and codec.decode(codec.encode("a .")) == "a ."


def test_a_decoder_that_cannot_be_streamed_is_refused_at_export(model: Path, tmp_path: Path) -> None:
    tokenizer = fresh_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.CTC()
    folder = copied(model, tmp_path, *TOKENIZER_FILES)
    tokenizer.save_pretrained(folder)
    with pytest.raises(UnsupportedModelError, match="decoder CTC cannot be streamed"):
        export(ExportOptions(str(folder), tmp_path / "bundle"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_tokenizer_whose_class_decodes_otherwise_is_refused(tmp_path: Path) -> None:
    """transformers' class may do more than ``tokenizer.json`` describes."""

    class Shouting(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super()._decode(*args, **kwargs)).upper()

    class Other(PreTrainedTokenizerFast):  # type: ignore[misc]
        def __call__(self, text: str, **kwargs: Any) -> Any:
            return super().__call__(text[::-1], **kwargs)

    for kind, message in ((Shouting, "decoded text is"), (Other, "the ids of a text are")):
        tokenizer = kind(tokenizer_object=Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str()))
        with pytest.raises(
            UnsupportedModelError, match=rf"{message} .* from place \d+ on, expected .* as in transformers"
        ):
            written(tokenizer, tmp_path / kind.__name__)


def test_a_tokenizer_that_encodes_nothing_is_refused(tmp_path: Path) -> None:
    backend = Tokenizer(models.BPE({"x": 0, "y": 1}, []))
    backend.add_tokens([AddedToken("q")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("x", "")
    tokenizer.backend_tokenizer.model = models.BPE({"☃": 0}, [])
    with pytest.raises(SourceError, match="cannot encode a text: prompt: got no tokens"):
        written(tokenizer, tmp_path, 3)


def test_the_whole_map_of_special_tokens_is_kept(tmp_path: Path) -> None:
    given = {"pad_token": EOS, "unk_token": EOS, "model_specific_special_tokens": {"image_token": BOS}}
    template = "{{ bos_token }}{{ pad_token }}{{ unk_token }}{{ image_token }}{{ cls_token is defined }}"
    tokenizer = fresh_tokenizer(**given, chat_template=template + "{{ messages[-1].content }}")
    entry, codec, _ = written(tokenizer, tmp_path)
    names = {"bos_token": BOS, "eos_token": EOS, "unk_token": EOS, "pad_token": EOS, "image_token": BOS}
    assert entry.special_tokens == names
    assert codec.render([{"role": "user", "content": "x"}]) == f"{BOS}{EOS}{EOS}{BOS}Falsex"


def test_templates_of_a_folder_are_taken_by_name(model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path, "*.jinja")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("RAG {{ messages[-1].content }}")
    entry, codec, notes = written(AutoTokenizer.from_pretrained(folder), tmp_path / "without")
    assert (entry.chat_template, list(entry.named_chat_templates)) == (None, ["rag"])
    assert notes == ["the model has no default chat template; --chat-template-name selects one of rag"]
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    entry, codec, notes = written(AutoTokenizer.from_pretrained(folder), tmp_path / "with")
    assert (list(entry.templates), notes) == (["rag", "default"], [])
    assert codec.render([{"role": "user", "content": "x"}]) == f"{BOS}user\nx{EOS}\n{BOS}assistant\n"


def test_templates_that_fail_in_transformers_are_reported(tmp_path: Path) -> None:
    entry, _, notes = written(fresh_tokenizer(chat_template="{% if %}"), tmp_path / "syntax")
    assert entry.templates == {}
    assert notes == [
        "chat template 'default' cannot be compiled and is left out: Expected an expression, got 'end of "
        "statement block'; prompts will be plain text"
    ]
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"
    )
    entry, _, notes = written(fresh_tokenizer(chat_template=template), tmp_path / "system")
    assert (notes, entry.chat_template is None) == (
        ["the chat template does not take a system message: no system"],
        False,
    )


def test_a_template_that_renders_otherwise_than_in_transformers_is_refused(tmp_path: Path) -> None:
    class Other(PreTrainedTokenizerFast):  # type: ignore[misc]
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            return f"{super().apply_chat_template(*args, **kwargs)}!"

    backend = Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    with pytest.raises(UnsupportedModelError, match=r"chat template: a user message becomes .* as in transformers"):
        written(Other(tokenizer_object=backend, chat_template=CHAT_TEMPLATE), tmp_path)


def test_a_template_may_write_the_time(tmp_path: Path) -> None:
    template = "{{ strftime_now('%H:%M:%S') }}{{ messages[-1].content }}"
    written(fresh_tokenizer(chat_template=template), tmp_path)


@pytest.mark.parametrize("answer", [[3], [], [3, 4] * 30], ids=["one id", "none", "two"])
@pytest.mark.parametrize("vocab_size", [5, 16, 320, 49152])
@pytest.mark.parametrize("max_seq_len", [17, 48, 2048])
def test_reference_ids_are_never_all_the_same(answer: list[int], vocab_size: int, max_seq_len: int) -> None:
    def tokenizer(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": answer}

    ids = reference_ids(tokenizer, vocab_size, max_seq_len)
    num = min(48, max_seq_len)
    assert ids.shape == (num,) and set(ids.tolist()) <= set(range(vocab_size))
    assert len(np.unique(ids)) >= min(MIN_DISTINCT_IDS, vocab_size, num // 2)
    assert ids[0] == (answer or [0])[0]


def test_reference_ids_of_a_text_are_the_text_s() -> None:
    """The control: a tokenizer that has the text is not changed."""
    tokenizer = tiny_tokenizer()
    ids = reference_ids(tokenizer, VOCAB_SIZE)
    assert tokenizer.decode(ids).startswith("def area(radius):\n    return 3.14159")


def test_each_refusal_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecrtError) as caught:
        written(fresh_tokenizer(), tmp_path, 100)
    assert "\n" not in str(caught.value)
