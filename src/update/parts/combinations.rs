//! Combinations of parts in which one undoes another.

use super::super::momentum::MomentumConfig;
use super::super::step_size::WeightDecay;
use super::{Part, RelativeTo, Stage};
use crate::error::{Error, Result};

/// Fails for combinations of parts, and of parts with momentum or weight decay, that no run can
/// use: a setting would have no effect, or two would contradict each other.
pub(crate) fn check(
    parts: &[Part],
    momentum: &MomentumConfig,
    weight_decay: &WeightDecay,
) -> Result<()> {
    let together = |value: String, expected| Err(Error::setting("parts", value, expected));
    if let Some(twice) = first_repeated(parts) {
        return together(format!("{twice} twice"), "every part at most once");
    }
    if let Some((sized, resized)) = first_resized(parts) {
        return together(
            format!("{resized} right after {sized}"),
            "only one of them, or the other order, since the later one undoes the scale of the \
             earlier one",
        );
    }
    let corrected = momentum.bias_correction;
    let differs =
        |part: &&Part| matches!(part, Part::Namo(namo) if namo.bias_correction != corrected);
    if parts.iter().any(|part| differs(&part)) {
        return Err(Error::setting(
            "parts.Namo.bias_correction",
            !corrected,
            "the same as `momentum.bias_correction`, since the update is a ratio of both moments",
        ));
    }
    let has_mixture = parts.iter().any(|part| matches!(part, Part::MomentumMixture(_)));
    if has_mixture && momentum.momentum.extremes().any(|momentum| momentum != 0.0) {
        return Err(Error::setting(
            "momentum",
            format!("{:?} with a mixture of momenta", momentum.momentum),
            "zero, since the mixture is the momentum",
        ));
    }
    let fixes_norm = |part: &&Part| matches!(part, Part::Muown(_) | Part::Hyperball(_));
    let sets_norm =
        |part: &&Part| fixes_norm(part) || matches!(part, Part::MaxNorm(_) | Part::RadialBrake(_));
    if let Some(ahead) = parts.iter().find(|part| matches!(part, Part::EmaNesterov(_))) {
        let name = ahead.behaviour().name();
        if let Some(other) = parts.iter().find(sets_norm) {
            return together(
                format!("{name} with {other}"),
                "only one of them, since the point ahead has not the norm that the other sets",
            );
        }
        if matches!(weight_decay, WeightDecay::CautiousAfter(_)) {
            return Err(Error::setting(
                "weight_decay",
                format!("{weight_decay:?} with {name}"),
                "another kind, since the average of the steps would lack this one",
            ));
        }
    }
    if let Some(namo) = parts.iter().position(|part| matches!(part, Part::Namo(p) if p.decays())) {
        if weight_decay.rate().extremes().any(|rate| rate != 0.0) {
            return Err(Error::setting(
                "weight_decay",
                format!("{weight_decay:?} with a decay of NAMO"),
                "zero, since NAMO decays at the rate of its update (or leave \
                 `Namo::weight_decay` at zero)",
            ));
        }
        if let Some(other) = parts.iter().find(fixes_norm) {
            return together(
                format!("{other} with a decay of NAMO"),
                "no `Namo::weight_decay`, since the other part sets the norm of the parameter",
            );
        }
        if parts[..namo].iter().any(|part| matches!(part, Part::EmaNesterov(_))) {
            return together(
                "EMA-Nesterov before a decay of NAMO".to_owned(),
                "the other order, since the average of the steps would lack the decay",
            );
        }
    }
    // The rest is about a part that fixes the norms of parameters.
    let Some(fixing) = parts.iter().find(fixes_norm) else {
        return Ok(());
    };
    if let Some(other) = parts.iter().filter(sets_norm).find(|part| !std::ptr::eq(*part, fixing)) {
        return together(
            format!("{} with {other}", fixing.behaviour().name()),
            "only one of them, since both set the norm of the parameter",
        );
    }
    use WeightDecay::{Decoupled, Independent, SquaredRate};
    let expected = match (fixing, weight_decay) {
        (Part::Muown(_), _) => {
            "zero, since Muown decays the magnitudes alone (set `Muown::weight_decay`)"
        }
        (_, Decoupled(_) | Independent(_) | SquaredRate(_)) => {
            "zero, since hyperball restores the norm that decay makes smaller"
        }
        // The other kinds also turn the parameter.
        _ => return Ok(()),
    };
    if weight_decay.rate().extremes().any(|rate| rate != 0.0) {
        let value = format!("{weight_decay:?} with {}", fixing.behaviour().name());
        return Err(Error::setting("weight_decay", value, expected));
    }
    Ok(())
}

/// The first part of a kind that is listed before: both would store their state under one name.
fn first_repeated(parts: &[Part]) -> Option<&Part> {
    let kind = |part: &Part| std::mem::discriminant(part);
    (0..parts.len())
        .find(|index| parts[..*index].iter().any(|p| kind(p) == kind(&parts[*index])))
        .map(|index| &parts[index])
}

/// The first part that only scales every matrix, and the next part after the iteration, if that
/// sets the norm anew. Another part between both may depend on the scale.
fn first_resized(parts: &[Part]) -> Option<(&Part, &Part)> {
    let after: Vec<&Part> =
        parts.iter().filter(|part| part.stages().contains(&Stage::After)).collect();
    let only_scales = |part: &Part| match part {
        Part::Renormalization(_) => true,
        Part::Namo(part) => part.per_input.is_none(),
        Part::RelativeUpdate(part) => part.to == RelativeTo::Matrix,
        _ => false,
    };
    let sets_norm = |part: &Part| match part {
        Part::Renormalization(_) | Part::Hyperball(_) => true,
        Part::RelativeUpdate(part) => part.is_exact(),
        _ => false,
    };
    let resized = after.windows(2).find(|pair| only_scales(pair[0]) && sets_norm(pair[1]));
    resized.map(|pair| (pair[0], pair[1]))
}
