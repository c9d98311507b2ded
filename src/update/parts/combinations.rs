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
    ensure_single(parts)?;
    ensure_momentum_fits(parts, momentum)?;
    ensure_point_ahead_fits(parts, weight_decay)?;
    ensure_decay_of_namo_fits(parts, weight_decay)?;
    ensure_norm_is_set_once(parts, weight_decay)
}

fn together(value: String, expected: &'static str) -> Result<()> {
    Err(Error::setting("parts", value, expected))
}

fn of_decay(value: String, expected: &'static str) -> Result<()> {
    Err(Error::setting("weight_decay", value, expected))
}

fn decays(weight_decay: &WeightDecay) -> bool {
    weight_decay.rate().extremes().any(|rate| rate != 0.0)
}

fn fixes_norm(part: &Part) -> bool {
    matches!(part, Part::Muown(_) | Part::Hyperball(_))
}

fn sets_norm(part: &Part) -> bool {
    fixes_norm(part) || matches!(part, Part::MaxNorm(_) | Part::RadialBrake(_))
}

/// Fails for a part that is there twice, or whose scale the next one undoes.
fn ensure_single(parts: &[Part]) -> Result<()> {
    if let Some(twice) = first_repeated(parts) {
        return together(format!("{twice} twice"), "every part at most once");
    }
    match first_resized(parts) {
        None => Ok(()),
        Some((sized, resized)) => together(
            format!("{resized} right after {sized}"),
            "only one of them, or the other order, since the later one undoes the scale of the \
             earlier one",
        ),
    }
}

fn ensure_momentum_fits(parts: &[Part], momentum: &MomentumConfig) -> Result<()> {
    let corrected = momentum.bias_correction;
    let differs =
        |part: &Part| matches!(part, Part::Namo(namo) if namo.bias_correction != corrected);
    if parts.iter().any(differs) {
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
    Ok(())
}

/// Fails if the point ahead of EMA-Nesterov would lack a norm or a decay.
fn ensure_point_ahead_fits(parts: &[Part], weight_decay: &WeightDecay) -> Result<()> {
    let ahead = parts.iter().find(|part| matches!(part, Part::EmaNesterov(_)));
    let Some(name) = ahead.map(|part| part.behaviour().name()) else { return Ok(()) };
    if let Some(other) = parts.iter().find(|part| sets_norm(part)) {
        return together(
            format!("{name} with {other}"),
            "only one of them, since the point ahead has not the norm that the other sets",
        );
    }
    match weight_decay {
        WeightDecay::CautiousAfter(_) => of_decay(
            format!("{weight_decay:?} with {name}"),
            "another kind, since the average of the steps would lack this one",
        ),
        _ => Ok(()),
    }
}

fn ensure_decay_of_namo_fits(parts: &[Part], weight_decay: &WeightDecay) -> Result<()> {
    let place = parts.iter().position(|part| matches!(part, Part::Namo(namo) if namo.decays()));
    let Some(place) = place else { return Ok(()) };
    if decays(weight_decay) {
        return of_decay(
            format!("{weight_decay:?} with a decay of NAMO"),
            "zero, since NAMO decays at the rate of its update (or leave `Namo::weight_decay` at \
             zero)",
        );
    }
    if let Some(other) = parts.iter().find(|part| fixes_norm(part)) {
        return together(
            format!("{other} with a decay of NAMO"),
            "no `Namo::weight_decay`, since the other part sets the norm of the parameter",
        );
    }
    match parts[..place].iter().any(|part| matches!(part, Part::EmaNesterov(_))) {
        true => together(
            "EMA-Nesterov before a decay of NAMO".to_owned(),
            "the other order, since the average of the steps would lack the decay",
        ),
        false => Ok(()),
    }
}

/// Fails for a part that fixes the norms of parameters, next to another one or to a decay of them.
fn ensure_norm_is_set_once(parts: &[Part], weight_decay: &WeightDecay) -> Result<()> {
    let Some(fixing) = parts.iter().find(|part| fixes_norm(part)) else { return Ok(()) };
    let mut others = parts.iter().filter(|part| !std::ptr::eq(*part, fixing));
    if let Some(other) = others.find(|part| sets_norm(part)) {
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
    match decays(weight_decay) {
        true => of_decay(format!("{weight_decay:?} with {}", fixing.behaviour().name()), expected),
        false => Ok(()),
    }
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
