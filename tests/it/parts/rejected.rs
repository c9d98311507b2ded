//! Settings and combinations of parts that no run can use.

use burn::module::Param;
use distmuon::parts::{
    AdaMuon, EmaNesterov, Hyperball, Mars, MaxNorm, MomentumMixture, Muown, Namo, NorMuon,
    RadialBrake, RelativeUpdate, Renormalization, RowEquilibration,
};
use distmuon::{Error, MomentumConfig, MuonConfig, Part, RoutingRule, Schedule, WeightDecay};

use super::{One, plain, random, tensor};

/// The setting that is rejected, and the message.
fn rejected(config: &MuonConfig) -> (String, String) {
    let error = config.try_build().map(|_| ()).unwrap_err();
    let Error::Setting { setting, .. } = &error else { panic!("{error}") };
    (setting.clone(), error.to_string())
}

#[test]
fn invalid_settings_of_parts_are_rejected() {
    let no_decays = [-0.1, 1.0, f64::NAN];
    let no_sizes = [-1e-8, f64::INFINITY, f64::NAN];
    let not_above_zero = [0.0, -1.0, f64::INFINITY, f64::NAN];
    let mut invalid: Vec<(Part, &str)> = vec![];
    for value in no_decays {
        invalid.push((NorMuon::new(value).into(), "NorMuon.beta_2"));
        invalid.push((NorMuon::per_output(value).into(), "NorMuon.beta_2"));
        invalid.push((AdaMuon::new(value).into(), "AdaMuon.beta_2"));
        invalid.push((Namo::new(value).into(), "Namo.beta_2"));
    }
    for value in [-0.1, 1.1, f64::NAN] {
        invalid.push((Namo::per_input(0.9, value).into(), "Namo.per_input"));
    }
    for value in no_sizes {
        invalid.push((NorMuon::new(0.9).with_epsilon(value).into(), "NorMuon.epsilon"));
        invalid.push((AdaMuon::new(0.9).with_epsilon(value).into(), "AdaMuon.epsilon"));
        invalid.push((Namo::new(0.9).with_epsilon(value).into(), "Namo.epsilon"));
        invalid.push((Namo::new(0.9).with_weight_decay(value).into(), "Namo.weight_decay"));
        invalid.push((Mars::new(value).into(), "Mars.gamma"));
    }
    for value in not_above_zero {
        let limited = Namo::new(0.9).with_largest_rate(Some(value));
        invalid.push((limited.into(), "Namo.largest_rate"));
        invalid.push((Hyperball::fixed(value).into(), "Hyperball.radius"));
        invalid.push((MaxNorm::new(value).into(), "MaxNorm.limit"));
        invalid.push((Renormalization::rms(value).into(), "Renormalization.target"));
        invalid.push((Renormalization::frobenius(value).into(), "Renormalization.target"));
    }
    for value in no_decays {
        invalid.push((Muown::new().with_betas([value, 0.9]).into(), "Muown.betas"));
        invalid.push((Muown::new().with_betas([0.9, value]).into(), "Muown.betas"));
        let mixture = MomentumMixture::new(vec![1.0], vec![1.0], value);
        invalid.push((mixture.into(), "MomentumMixture.momentum"));
        let ahead = EmaNesterov::new(0.5.into()).with_decay(value);
        invalid.push((ahead.into(), "EmaNesterov.decay"));
    }
    for value in no_sizes {
        let ahead = EmaNesterov::new(Schedule::constant(0.5).linear(3, value));
        invalid.push((ahead.into(), "EmaNesterov.lookahead"));
        invalid.push((Muown::new().with_epsilon(value).into(), "Muown.epsilon"));
        invalid.push((Muown::new().with_weight_decay(value).into(), "Muown.weight_decay"));
        let ages = MomentumMixture::new(vec![1.0, value], vec![0.5; 2], 0.9);
        invalid.push((ages.into(), "MomentumMixture.ages"));
        let weights = MomentumMixture::new(vec![1.0, 2.0], vec![0.5, value], 0.9);
        invalid.push((weights.into(), "MomentumMixture.weights"));
    }
    for count in [0, 9] {
        let mixture = MomentumMixture::new(vec![1.0; count], vec![0.1; count], 0.9);
        invalid.push((mixture.into(), "MomentumMixture.ages"));
    }
    let uneven = MomentumMixture::new(vec![1.0, 2.0], vec![1.0], 0.9);
    invalid.push((uneven.into(), "MomentumMixture.weights"));
    for value in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
        invalid.push((RadialBrake::new(value, 1.0).into(), "RadialBrake.outward"));
        invalid.push((RadialBrake::new(0.5, value).into(), "RadialBrake.inward"));
    }
    for value in [-0.1, f64::NAN, f64::INFINITY] {
        invalid.push((RelativeUpdate::floor(value).into(), "RelativeUpdate.least"));
        let most = RelativeUpdate::floor_per_output(0.5).with_most(Some(value));
        invalid.push((most.into(), "RelativeUpdate.most"));
    }
    invalid.push((RelativeUpdate::exact(1.0).with_most(Some(0.9)).into(), "RelativeUpdate.most"));
    for (part, name) in invalid {
        let text = format!("{part:?}");
        let (setting, _) = rejected(&plain().with_parts(vec![part]));
        assert_eq!(setting, format!("parts.{name}"), "{text}");
    }
}

#[test]
fn combinations_that_undo_each_other_are_rejected_with_the_reason() {
    let (ball, namo) = (Part::from(Hyperball::initial()), Part::from(Namo::new(0.9)));
    let orthogonal = Part::from(Renormalization::orthogonal());
    let ahead = Part::from(EmaNesterov::new(0.5.into()));
    let decaying = Part::from(Namo::new(0.9).with_weight_decay(0.1));
    for (parts, reason) in [
        (vec![NorMuon::new(0.9).into(), NorMuon::per_output(0.5).into()], "at most once"),
        (vec![RowEquilibration.into(), RowEquilibration.into()], "at most once"),
        (vec![ball.clone(), MaxNorm::new(1.0).into()], "set the norm of the parameter"),
        (vec![MaxNorm::new(1.0).into(), ball.clone()], "set the norm of the parameter"),
        (vec![ball.clone(), RadialBrake::new(0.5, 1.0).into()], "set the norm of the parameter"),
        (vec![Muown::new().into(), ball.clone()], "set the norm of the parameter"),
        (vec![MaxNorm::new(1.0).into(), Muown::new().into()], "set the norm of the parameter"),
        (vec![ahead.clone(), ball.clone()], "norm that the other sets"),
        (vec![MaxNorm::new(1.0).into(), ahead.clone()], "norm that the other sets"),
        (vec![Muown::new().into(), ahead.clone()], "norm that the other sets"),
        (vec![ball.clone(), decaying.clone()], "sets the norm of the parameter"),
        (vec![decaying.clone(), Muown::new().into()], "sets the norm of the parameter"),
        (vec![ahead.clone(), decaying.clone()], "would lack the decay"),
        (vec![namo.clone(), ball.clone()], "undoes the scale"),
        (vec![namo.clone(), orthogonal.clone()], "undoes the scale"),
        // Parts of other stages are not in between.
        (vec![namo.clone(), RowEquilibration.into(), orthogonal.clone()], "undoes the scale"),
        (vec![orthogonal.clone(), ball.clone()], "undoes the scale"),
        (vec![orthogonal.clone(), RelativeUpdate::exact(1.0).into()], "undoes the scale"),
        (vec![RelativeUpdate::floor(0.35).into(), orthogonal.clone()], "undoes the scale"),
    ] {
        let text = format!("{parts:?}");
        let (setting, message) = rejected(&plain().with_parts(parts));
        assert!(setting == "parts" && message.contains(reason), "{text}: {message}");
    }
    for corrects in [false, true] {
        let momentum = MomentumConfig::new().with_bias_correction(!corrects);
        let part = Namo::new(0.9).with_bias_correction(corrects).into();
        let config = plain().with_parts(vec![part]).with_momentum(momentum);
        let (setting, message) = rejected(&config);
        assert_eq!(setting, "parts.Namo.bias_correction");
        assert!(message.contains("the same as `momentum.bias_correction`"), "{message}");
    }
    // In these, each part has an effect.
    for parts in [
        vec![ball.clone(), namo.clone()],
        vec![Namo::per_input(0.9, 0.75).into(), ball.clone()],
        vec![orthogonal.clone(), namo.clone()],
        vec![namo, NorMuon::new(0.9).into(), ball.clone()],
        vec![orthogonal, NorMuon::new(0.9).into()],
        vec![MaxNorm::new(1.0).into(), Mars::new(0.1).into()],
        vec![MaxNorm::new(1.0).into(), decaying.clone()],
        vec![decaying, ahead],
    ] {
        plain().with_parts(parts).try_build().unwrap();
    }
}

#[test]
fn decay_that_hyperball_undoes_is_rejected() {
    let with = |decay: WeightDecay| {
        plain().with_parts(vec![Hyperball::initial().into()]).with_weight_decay(decay)
    };
    let later = || Schedule::constant(0.0).linear(10, 0.1);
    for decay in [
        WeightDecay::from(0.1),
        WeightDecay::Decoupled(later()),
        WeightDecay::Independent(0.1.into()),
        WeightDecay::SquaredRate(0.1.into()),
    ] {
        let (setting, message) = rejected(&with(decay));
        assert!(setting == "weight_decay" && message.contains("hyperball restores"), "{message}");
    }
    // These also change the direction.
    for decay in [
        WeightDecay::from(0.0),
        WeightDecay::Cautious(0.1.into()),
        WeightDecay::CautiousScaled(later()),
        WeightDecay::Coupled(0.1.into()),
    ] {
        with(decay).try_build().unwrap();
    }
}

#[test]
fn a_mixture_replaces_the_momentum_and_muown_and_namo_the_decay() {
    let mixture = || plain().with_parts(vec![MomentumMixture::k_maxwell().into()]);
    for momentum in [Schedule::from(0.9), Schedule::momentum_warmup(0.95, 3)] {
        let (setting, message) = rejected(&mixture().with_momentum(momentum.into()));
        let reason = "the mixture is the momentum";
        assert!(setting == "momentum" && message.contains(reason), "{message}");
    }
    mixture().with_momentum(Schedule::constant(0.0).into()).try_build().unwrap();

    let muown = || plain().with_parts(vec![Muown::new().into()]);
    for decay in [WeightDecay::from(0.1), WeightDecay::Cautious(0.1.into())] {
        let (setting, message) = rejected(&muown().with_weight_decay(decay));
        assert!(setting == "weight_decay" && message.contains("Muown::weight_decay"), "{message}");
    }
    muown().with_weight_decay(0.0.into()).try_build().unwrap();

    let namo =
        |decay: f64| plain().with_parts(vec![Namo::new(0.9).with_weight_decay(decay).into()]);
    let later = WeightDecay::Cautious(Schedule::constant(0.0).linear(10, 0.1));
    for decay in [WeightDecay::from(0.1), WeightDecay::Coupled(0.1.into()), later] {
        let (setting, message) = rejected(&namo(0.1).with_weight_decay(decay.clone()));
        let reason = "expected zero, since NAMO decays at the rate of its update";
        assert!(setting == "weight_decay" && message.contains(reason), "{message}");
        namo(0.0).with_weight_decay(decay).try_build().unwrap();
    }
    let rule = RoutingRule::muon("weight").weight_decay(0.2);
    let model = One { weight: Param::from_tensor(tensor(&random(4, 6, 1))) };
    let error = namo(0.1).with_rule(rule).try_init(&model).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("NAMO decays at the rate of its update"), "{error}");
    namo(0.1).try_build().unwrap();

    let ahead = || plain().with_parts(vec![EmaNesterov::new(0.5.into()).into()]);
    let after = WeightDecay::CautiousAfter(0.1.into());
    let (setting, message) = rejected(&ahead().with_weight_decay(after));
    assert!(setting == "weight_decay" && message.contains("average of the steps"), "{message}");
    ahead().with_weight_decay(0.1.into()).try_build().unwrap();
}

#[test]
fn parts_are_shown_by_name_and_stage() {
    for (part, text) in [
        (Part::from(NorMuon::new(0.9)), "NorMuon (after the iteration)"),
        (Mars::new(0.1).into(), "MARS (on the gradient)"),
        (Namo::new(0.9).into(), "NAMO (after the iteration)"),
        (
            Namo::new(0.9).with_weight_decay(0.1).into(),
            "NAMO (after the iteration and on the parameter)",
        ),
        (Hyperball::initial().into(), "hyperball (after the iteration and on the parameter)"),
    ] {
        assert_eq!(part.to_string(), text);
    }
}
