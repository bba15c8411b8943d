"""Dummy inputs of a model: the calls that it is planned with, derived from its signature and its configuration.

A *scene* is one kind of call: text alone, text with images, audio. The richest one comes first: it runs the towers and
the decoder. Inputs have to agree with one another: there are as many placeholder tokens as the tower has features. The
number is read off the model itself, which is run for its shapes (:mod:`.shapes`). The same run says whether a form of
inputs is the right one; if not, the next is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from .beside import REQUIRED, add_beside, missing_ones, more_token_ids
from .facts import Facts
from .forms import FORMS, Form, arguments_of, forms_of
from .shapes import Counts, run_for_shapes

Inputs = dict[str, Any]

TEXT = 6
"""Tokens of text beside those of images, at least."""

SEQUENCES = {
    "image": ("image_seq_length", "mm_tokens_per_image", "num_image_tokens", "num_query_tokens", "image_token_num"),
    "video": ("video_seq_length", "num_video_tokens"),
    "audio": ("audio_seq_length", "num_audio_tokens"),
}
"""Fields with the placeholder tokens of one image, video or piece of audio."""


class NotDerived(ValueError):
    """No dummy inputs of a model were found."""


def dummy_scenes(facts: Facts) -> Iterator[Inputs]:
    """The calls to plan a model with, the richest first.

    Raises:
        NotDerived: there are none.
    """
    found: dict[str, Form] = {}
    single: list[Inputs] = []
    errors: dict[str, Exception] = {}
    for modality in FORMS:
        try:
            form, inputs = _find_form(facts, modality)
        except NotDerived as error:
            errors[modality] = error
        else:
            if form is not None:
                found[modality] = form
                single.append(inputs)
    count = 0
    if len(found) > 1:
        try:
            joint = _consistent(facts, found, ())
        except Exception as error:  # whatever the model's own code raises on such a call
            errors["all of them"] = error
        else:
            count += 1
            yield joint
    for inputs in single:
        count += 1
        yield inputs
    text = text_scene(facts, check=bool(found or errors))
    if text is not None:
        count += 1
        yield text
        more = _other_texts(facts, text)
        if more is not None:
            yield more
    if not count:
        own = _of_the_class(facts) or text_scene(facts, check=False)
        if own is None:
            raise NotDerived(_what_to_pass(facts, errors))
        yield own
    elif errors and found.keys() != errors.keys() | found.keys():
        logging.getLogger("paraxis").warning(
            "%s is planned without %s: %s Parameters that only such calls use are sharded for memory and gathered.",
            type(facts.model).__name__,
            ", ".join(errors),
            _what_to_pass(facts, errors),
        )


def text_scene(facts: Facts, check: bool = True) -> Inputs | None:
    """A call with text alone; None if the model does not take one."""
    for optional in ((), *([("attention_mask",), tuple(REQUIRED)] if check else [])):
        inputs, places = with_text(facts, {}, {})
        add_beside(facts, inputs, places, optional)
        if missing_ones(facts, inputs) or not inputs:
            continue
        if not check:
            return inputs
        try:
            run_for_shapes(facts.model, inputs)
        except Exception:  # whatever the model's own code raises on such a call
            continue
        return inputs
    return None


def _other_texts(facts: Facts, text: Inputs) -> Inputs | None:
    """A call with all token ids that the model has arguments for, such as those of a protein beside a question."""
    names = [name for name in facts.arguments if name.endswith("_input_ids") and name not in text]
    if not names:
        return None
    inputs = dict(text)
    for name in names:
        inputs[name] = more_token_ids(facts, inputs, {})
        mask = name.replace("input_ids", "attention_mask")
        if mask in facts.arguments:
            inputs[mask] = torch.ones_like(inputs[name])
    try:
        run_for_shapes(facts.model, inputs)
    except Exception:  # whatever the model's own code raises on such a call
        return None
    return inputs


def _of_the_class(facts: Facts) -> Inputs | None:
    """The dummy inputs that the model's class brings along, if the model runs with them."""
    try:
        inputs = {name: value.to(facts.device) for name, value in facts.model.dummy_inputs.items()}  # type: ignore
        run_for_shapes(facts.model, inputs)
    except Exception:  # there are none, or the model's own code does not take them
        return None
    return inputs


def _find_form(facts: Facts, modality: str) -> tuple[Form | None, Inputs]:
    """The first form of a modality with which the model runs, and its inputs; None if it does not take the modality."""
    forms, first = forms_of(facts, modality), None
    if not forms:
        return None, {}
    for optional in ((), ("attention_mask",), tuple(REQUIRED), ("input_ids",), ("input_ids", "attention_mask")):
        if optional == ("input_ids",) and takes_ids_with_others(facts):
            break  # they are in all of the above
        for form in forms:
            try:
                return form, _consistent(facts, {modality: form}, optional)
            except Exception as error:  # whatever the model's own code raises on inputs of another form
                first = first or error
    assert first is not None
    raise NotDerived(f"{type(first).__name__}: {(str(first).splitlines() or [''])[0]}") from first


def _consistent(facts: Facts, forms: dict[str, Form], optional: tuple[str, ...]) -> Inputs:
    """Inputs of these forms, with as many placeholder tokens as the model has features."""
    modal: Inputs = {}
    for form in forms.values():
        modal.update(arguments_of(facts, form))
    candidates: list[Counts] = [{}]
    tried: list[Counts] = []
    runs: Inputs | None = None
    failed: Exception | None = None
    while candidates:
        counts = candidates.pop(0)
        if counts in tried:
            continue
        tried.append(counts)
        inputs, places = with_text(facts, modal, counts, ids="input_ids" in optional)
        add_beside(facts, inputs, places, optional)
        lacking = missing_ones(facts, inputs)
        if lacking:
            raise NotDerived(f"nothing is known of the required arguments {', '.join(lacking)}")
        try:
            _, features = run_for_shapes(facts.model, inputs)
        except Exception as error:  # whatever the model's own code raises on inputs that do not agree
            features, failed = getattr(error, "counts", {}), error
            candidates += [_wanted(facts, forms, features), _configured(facts, forms)]
            candidates += [] if features else [_some(facts, forms)]
            continue
        wanted = _wanted(facts, forms, features)
        if wanted in tried:
            return inputs
        runs = runs or inputs  # it runs, but some features have no place: better with as many tokens
        candidates = [wanted]
    if runs is not None:
        return runs
    assert failed is not None
    raise failed


def _wanted(facts: Facts, forms: dict[str, Form], features: Counts) -> Counts:
    """As many placeholder tokens as there were features, of modalities that have such a token."""
    found = {}
    for modality in forms:
        count = features.get(modality, features.get("scattered", 0) if len(forms) == 1 else 0)
        if count and placeholder(facts, modality) is not None and count % facts.batch == 0:
            found[modality] = count
    return found


def _some(facts: Facts, forms: dict[str, Form]) -> Counts:
    """Some placeholder tokens of every modality: without any, a model may not come to where its features are put."""
    return {m: TEXT * facts.batch for m in forms if placeholder(facts, m) is not None}


def _configured(facts: Facts, forms: dict[str, Form]) -> Counts:
    """The numbers of placeholder tokens that the configuration or the processor says."""
    found = {}
    for modality in forms:
        count = facts.vision(*SEQUENCES[modality]) if modality != "audio" else facts.audio(*SEQUENCES[modality])
        if isinstance(count, int) and placeholder(facts, modality) is not None:
            found[modality] = count * facts.batch
    return found


def placeholder(facts: Facts, modality: str) -> int | None:
    """The token that stands for a feature of this modality; None if the model has none."""
    names = [modality, "image"] if modality == "video" else [modality]
    for name in names:
        found = facts.field((), (f"{name}_token_id", f"{name}_token_index"))
        if isinstance(found, int):
            return found
    return None


def takes_ids_with_others(facts: Facts) -> bool:
    """Whether token ids go with images or audio: not where the class says that it takes no text."""
    return "input_ids" in facts.arguments and not (facts.modalities and "text" not in facts.modalities)


def with_text(facts: Facts, modal: Inputs, counts: Counts, ids: bool = False) -> tuple[Inputs, dict[str, torch.Tensor]]:
    """These inputs with token ids, and by modality where the placeholder tokens are.

    With ``ids``, also where the class says that it takes no text.
    """
    ids = "input_ids" in facts.arguments and (ids or not modal or takes_ids_with_others(facts))
    inputs, places = _with_ids(facts, modal, counts) if ids else (dict(modal), {})
    if "decoder_input_ids" in facts.arguments:
        longest = facts.text("max_position_embeddings", "n_positions", "max_target_positions", default=0)
        limit = facts.text("max_target_positions", default=longest) or facts.length
        limit = min(facts.length, limit) if isinstance(limit, int) and limit > 0 else facts.length
        rows = inputs["input_ids"].shape[0] if "input_ids" in inputs else facts.batch
        inputs["decoder_input_ids"] = facts.ints(rows * facts.codebooks, limit, value=text_token(facts))
    return inputs, places


def _with_ids(facts: Facts, modal: Inputs, counts: Counts) -> tuple[Inputs, dict[str, torch.Tensor]]:
    inputs, places = dict(modal), {}
    longest = facts.text("max_position_embeddings", "n_positions", "max_target_positions", default=0)
    longest = longest if isinstance(longest, int) and longest > 0 else 0  # negative: no limit
    taken = sum(counts.values()) // facts.batch
    length = max(facts.length, taken + TEXT) if taken else facts.length
    length = min(length, max(longest, taken)) if longest else length
    rows = facts.batch * (getattr(facts.config, "num_codebooks", None) or 1)  # some take a row per codebook
    ids = facts.ints(rows, length, value=text_token(facts))
    at = min(2, length - taken)
    for modality, count in counts.items():
        each = count // facts.batch
        token = placeholder(facts, modality)
        assert token is not None
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, at : at + each] = True
        ids[mask] = token
        places[modality], at = mask, at + each
    inputs["input_ids"] = ids
    return inputs, places


def text_token(facts: Facts) -> int:
    """A token of text: the first but 0 that is no placeholder."""
    special = {placeholder(facts, modality) for modality in FORMS}
    return next(token for token in range(1, len(special) + 2) if token not in special)


def _what_to_pass(facts: Facts, errors: dict[str, Exception]) -> str:
    """The message for a model whose inputs cannot be derived: its arguments, and what was tried."""
    names = [name for name in facts.required] or [getattr(facts.model, "main_input_name", "input_ids")]
    tried = "; ".join(f"with {modality}: {error}" for modality, error in errors.items()) or "no argument is known"
    shapes = []
    for modality in FORMS:
        for form in forms_of(facts, modality)[:1]:
            made = arguments_of(facts, form)
            shapes += [f"{name} of shape {tuple(x.shape)}" for name, x in made.items() if isinstance(x, torch.Tensor)]
    guess = f" Expected are arguments such as {', '.join(shapes)}." if shapes else ""
    return (
        f"no dummy inputs of {type(facts.model).__name__} could be derived ({tried}). Pass example_inputs=, a dict of "
        f"the keyword arguments of one call (required: {', '.join(names)}), or a list of such dicts.{guess}"
    )
