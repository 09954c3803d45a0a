from swarmllm.client.view.agreed_traits import agreed_traits
from swarmllm.data_structures import BlockTraits


def test_padding_is_left_out_only_where_all_servers_say_so() -> None:
    said = [("a", BlockTraits(skips_padding=("left", "right"))), ("b", BlockTraits(skips_padding=("right",)))]
    assert agreed_traits(said).skips_padding == ("right",)
    assert agreed_traits(said[:1]).skips_padding == ("left", "right")
    assert agreed_traits([*said, ("old", BlockTraits())]).skips_padding == ()
