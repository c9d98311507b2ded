//! The names that reveal what a field of a model holds.

/// Names of fields that hold an output head, in addition to those that end in one of them after an
/// underscore.
const HEADS: [&str; 6] = ["head", "heads", "classifier", "unembed", "unembedding", "logits"];

/// Names of outputs that a model may have several of: of policies and values, of the parameters of
/// distributions, and of predictions.
const OUTPUTS: [&str; 25] = [
    "policy",
    "pi",
    "value",
    "values",
    "actor",
    "critic",
    "q",
    "advantage",
    "advantages",
    "adv",
    "mu",
    "mean",
    "var",
    "logvar",
    "std",
    "logstd",
    "sigma",
    "logit",
    "logits",
    "pred",
    "preds",
    "prediction",
    "predictions",
    "reward",
    "rewards",
];

/// Words next to [`OUTPUTS`] that do not change the meaning of a name, as in `fc_mu` and `log_std`.
const NEUTRAL: [&str; 10] =
    ["fc", "linear", "lin", "dense", "layer", "out", "output", "net", "network", "log"];

/// Names of layers whose outputs choose among others, or scale them.
const GATES: [&str; 4] = ["router", "gate", "gating", "gates"];

/// Names of layers that make scales and shifts of an embedding.
const MODULATIONS: [&str; 3] = ["modulation", "adaln", "film"];

/// A further name of an output head. It does not count if a field of the same depth has the name of
/// a head.
pub const OUTPUT: &str = "output";

/// Returns `true` for the name of an output head.
pub fn is_head(name: &str) -> bool {
    // The head of GPT-NeoX is named `embed_out`.
    name == "embed_out" || name == OUTPUT || HEADS.contains(&last_word(name))
}

/// Returns `true` for the name of one of several outputs: the words in it are [`OUTPUTS`], or
/// [`NEUTRAL`] ones next to them, or the last word is a prediction.
pub fn is_one_of_the_outputs(name: &str) -> bool {
    // A number between underscores, as in `q_1`, is no word.
    let words = || name.split('_').map(without_digits).filter(|word| !word.is_empty());
    let is_output = |word: &str| OUTPUTS.contains(&word);
    let is_prediction = |word: &str| word.starts_with("pred") || word.starts_with("logit");
    words().any(is_output) && words().all(|word| is_output(word) || NEUTRAL.contains(&word))
        || is_output(last_word(name)) && is_prediction(last_word(name))
}

/// Returns `true` for the name of a layer that is never an output of the model, although no layer
/// takes its outputs.
pub fn is_inner(name: &str) -> bool {
    has_word(name, &GATES) || is_modulation(name)
}

/// Returns `true` for the name of a layer that makes scales and shifts.
pub fn is_modulation(name: &str) -> bool {
    has_word(name, &MODULATIONS)
}

/// Returns `true` for the names of queries.
pub fn is_query(name: &str) -> bool {
    // A fused projection has both queries and keys, and so makes its module an attention by itself.
    has_word(name, &["q", "query", "queries", "wq", "qkv", "wqkv"])
}

/// Returns `true` for the names of keys.
pub fn is_key(name: &str) -> bool {
    has_word(name, &["k", "key", "keys", "kv", "wk", "qkv", "wqkv"])
}

/// Returns `true` for the names of attention modules.
pub fn is_attention(name: &str) -> bool {
    has_word(name, &["attention", "attn"])
}

/// Returns `true` for the names of fields that only recurrences without a hidden matrix have: the
/// time steps and decays of state spaces, and the receptance and decays of RWKV.
pub fn is_recurrence(name: &str) -> bool {
    let words = |all: &[&str]| all.iter().all(|word| has_word(name, &[word]));
    // Such as `dt_proj` and `A_log` of Mamba, and `time_decay` of RWKV.
    has_word(name, &["dt", "lambda", "receptance"])
        || [["a", "log"], ["log", "step"], ["time", "decay"]].iter().any(|all| words(all))
}

/// Returns `true` for the names of projections whose outputs are several matrices in one: queries,
/// keys and values, or the gates of a recurrent cell.
pub fn is_fused(name: &str) -> bool {
    has_word(name, &["qkv", "wqkv", "kv", "wkv", "gates", "ih", "hh"])
}

/// Returns `true` for the names of embeddings.
pub fn is_embedding(name: &str) -> bool {
    // An unembedding is a head.
    has_word(name, &["emb", "wte", "wpe"]) || name.contains("embed") && !name.contains("unembed")
}

/// Returns `true` for the names of tables by position, or by distance.
pub fn is_position(name: &str) -> bool {
    has_word(name, &["pos", "position", "positions", "positional", "rel", "relative"])
}

/// Returns `true` for the names of learned vectors that a model has many of.
pub fn is_learned_input(name: &str) -> bool {
    let words = [
        "token",
        "tokens",
        "register",
        "registers",
        "latent",
        "latents",
        "prompt",
        "prompts",
        "codebook",
        "codebooks",
        "codes",
        "prototype",
        "prototypes",
        "slots",
    ];
    has_word(name, &words)
}

/// Returns `true` for the names of biases, also of stacked ones.
pub fn is_bias(name: &str) -> bool {
    has_word(name, &["bias", "biases"])
}

/// Returns `true` for the names of factors of a low-rank adapter.
pub fn is_lora(name: &str) -> bool {
    has_word(name, &["lora"])
}

/// Returns `true` if a name has one of these words between its underscores.
fn has_word(name: &str, words: &[&str]) -> bool {
    // By whole words, since `q` and `emb` are also parts of others, and in any case, as `A_log`.
    name.split('_').any(|word| words.iter().any(|other| word.eq_ignore_ascii_case(other)))
}

fn last_word(name: &str) -> &str {
    name.rsplit('_').next().unwrap_or(name)
}

/// The name without the number at its end, as in `q1`.
pub fn without_digits(word: &str) -> &str {
    word.trim_end_matches(|c: char| c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_several_outputs_are_told_from_those_of_projections() {
        for name in ["policy", "q", "q1", "fc_mu", "log_std", "value_out", "cls_preds", "logvar"] {
            assert!(is_one_of_the_outputs(name), "{name}");
        }
        for name in ["advantage", "actor", "critic", "logits", "pred"] {
            assert!(is_one_of_the_outputs(name), "{name}");
        }
        for name in ["q_proj", "value_proj", "policy_conv", "mean_pool", "log", "fc1", "output"] {
            assert!(!is_one_of_the_outputs(name), "{name}");
        }
    }

    #[test]
    fn names_of_recurrences_are_told_from_those_of_other_fields() {
        for name in ["A_log", "a_log", "log_a_real", "dt_bias_h", "log_dt", "time_decay"] {
            assert!(is_recurrence(name), "{name}");
        }
        for name in ["time_embed", "log_std", "step", "weight_decay", "a"] {
            assert!(!is_recurrence(name), "{name}");
        }
    }
}
