"""Names that graph rewriting uses, compared with ONNX Runtime."""

from onnxruntime.capi import _pybind_state

from specedge.exporter.graph.nodes import GqaInput


def test_inputs_of_attention_have_the_positions_of_the_schema():
    (schema,) = (
        schema
        for schema in _pybind_state.get_all_operator_schema()
        if (schema.domain, schema.name) == ("com.microsoft", "GroupQueryAttention")
    )
    names = [value.name.upper() for value in schema.inputs]
    assert {x.name: x for x in GqaInput} == {x.name: names.index(x.name) for x in GqaInput}
