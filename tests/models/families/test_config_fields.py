"""Every field of transformers' config classes is read, has no effect, or is refused away from its default."""

import dataclasses
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from jpaged.models.errors import ModelLoadError
from jpaged.models.families.table import FAMILIES
from jpaged.models.fields import Fields
from jpaged.models.opening.reading import COMMON_FIXED_OPTIONS, COMMON_WITHOUT_EFFECT, config_from_hf

PATH = Path("config.json")


@pytest.mark.parametrize("family", FAMILIES, ids=[family.architecture for family in FAMILIES])
def test_every_field_of_the_transformers_class_is_accounted_for(family):
    theirs = CONFIG_MAPPING[family.model_type]
    data, model = theirs().to_dict(), family.load()
    keys = {*data, *theirs.attribute_map, *(field.name for field in dataclasses.fields(theirs))}
    fields = Fields({**model.config_defaults, **data}, PATH)
    config = model.read_config(fields)
    known = fields.asked | model.without_effect | COMMON_WITHOUT_EFFECT | model.fixed_options.keys()
    assert keys <= known
    assert not fields.asked & model.without_effect, "read, and said to have no effect"
    # A file with nothing but the class's name means the same as the class's defaults.
    sizes = {key: data[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers") if key in data}
    named = {key: value for key, value in data.items() if key in ("vocab_size", "num_attention_heads")}
    short = config_from_hf({"architectures": [family.architecture], **sizes, **named}, PATH)
    assert dataclasses.replace(short, dtype=config.dtype, architecture="") == config


@pytest.mark.parametrize("family", FAMILIES, ids=[family.architecture for family in FAMILIES])
def test_an_option_that_is_not_served_is_refused_by_name(family):
    data = {**CONFIG_MAPPING[family.model_type]().to_dict(), "architectures": [family.architecture]}
    for key, value in {**COMMON_FIXED_OPTIONS, **family.load().fixed_options}.items():
        with pytest.raises(ModelLoadError, match=f"config.json: {key} is {not value}, wanted {value}"):
            config_from_hf({**data, key: not value}, PATH)
