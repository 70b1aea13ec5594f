"""Published names of tensors that transformers renames."""

from formats.architecture.stored_form.deepseek_v4 import published


def names_by_published(model):
    """Published name of a tensor of DeepSeek-V4 -> its name in transformers' modules.

    Experts, which transformers stacks, have the names that `with_stacked_experts` reads.
    """
    names = {published(name): name for name in model.state_dict()}
    for number in range(model.config.num_hidden_layers):
        for expert in range(model.config.n_routed_experts):
            for leaf in ("w1", "w2", "w3"):
                name = f"experts.{expert}.{leaf}.weight"
                names[f"layers.{number}.ffn.{name}"] = f"model.layers.{number}.mlp.{name}"
    return names
