//! Owned parameters against those that every rank has: equal losses and equal bits.

mod adapters;
pub mod balancing;
mod identities;
mod messages;
mod other_threads;
pub mod rejections;
mod rows;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use burn::module::{Module, Param};
use burn::nn::conv::{Conv1d, Conv1dConfig};
use burn::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdafactorConfig, GradientsParams};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor, TensorData};
use distmuon::comm::World;
use distmuon::distributed::{
    Axis, DistModuleOptimizer, DistMuonConfig, GradDtype, Keep, Layout, LossScaleConfig, Mesh,
    Place, Publish,
};
use distmuon::{GradientBuffer, MasterWeights, MuonConfig, Result, RoutingRule};
use distmuon_testing::device::is_flex;
use distmuon_testing::models::{Fixed, Layers, bits, weights};
use distmuon_testing::precision::{Rounded, has};
use distmuon_testing::watched::{counted, watched};
use distmuon_testing::worlds::{self, Case, Folder, cases};

use crate::{device, loads_states, ranks, ranks_here};

pub const EVERYWHERE: &[Case] = cases![
    owned_parameters_train_as_replicated_ones,
    micro_batches_of_owned_parameters_are_added_up_before_they_are_reduced,
    parameters_owned_inside_nodes_train_as_replicated_ones,
    parameters_owned_on_several_hosts_train_as_replicated_ones,
    parameters_owned_inside_three_nodes_or_by_three_ranks_train_nearly_as_replicated_ones,
    sums_of_parts_are_those_of_whole_gradients,
    rounded_means_are_those_in_float32_in_the_type_of_parameters,
    checkpoints_move_between_layouts,
    gradients_that_the_backward_pass_reduces_are_those_of_the_step,
    owned_parameters_in_half_precision_are_clipped_and_scaled_as_replicated_ones,
    runs_continue_in_models_that_are_made_anew,
    gradients_of_a_clone_with_other_values_are_not_those_of_the_model,
    adapters_of_a_divided_base_train_as_on_one_rank,
    checkpoints_with_a_divided_base_continue_on_other_ranks,
    every_balancing_of_divided_parameters_trains_as_one_rank,
    measuring_draws_no_random_numbers,
    parameters_in_rows_train_as_replicated_ones,
    every_part_of_the_update_is_exact_for_rows,
    gradients_on_their_way_stay_within_the_limit_of_the_guide,
];

use adapters::{
    a_divided_base_is_held_in_parts_and_never_reduced,
    adapters_of_a_divided_base_train_as_on_one_rank,
    checkpoints_with_a_divided_base_continue_on_other_ranks,
    places_of_frozen_parameters_are_checked,
};
use balancing::{
    a_checkpoint_of_one_balancing_continues_under_another_in_a_new_process,
    a_table_of_owners_that_are_chosen_together_waits_for_the_division,
    every_balancing_of_divided_parameters_trains_as_one_rank,
    experts_in_slices_have_owners_among_the_ranks_that_hold_them,
    loads_of_a_mixture_of_widths_are_balanced_by_their_costs, measuring_draws_no_random_numbers,
    neighbouring_matrices_have_owners_in_node_order,
    owners_of_a_divided_model_are_those_of_its_balancing,
};
use identities::{
    a_device_without_gradient_checkpointing_is_warned_of,
    an_average_that_one_rank_has_changed_alone_is_rejected, averages_are_those_of_whole_parameters,
    averages_of_half_precision_are_in_float32,
    gradients_of_a_clone_with_other_values_are_not_those_of_the_model,
    gradients_under_other_identities_are_rejected, micro_batches_of_other_values_are_rejected,
    parameters_with_new_identities_are_trained, passes_that_are_not_trained_are_warned_of,
    runs_continue_in_models_that_are_made_anew, values_of_other_models_at_one_place_are_rejected,
};
use messages::{
    a_large_gradient_is_sent_once_and_its_sum_once_more,
    a_parameter_of_more_than_half_of_the_limit_is_sent_alone,
    a_pass_of_many_layers_makes_few_calls_that_send_each_gradient_once,
    a_weight_is_gathered_for_each_of_its_uses,
    a_whole_model_is_gathered_one_parameter_after_the_other,
    an_iteration_sends_what_the_guide_says, dropped_passes_hold_what_the_guide_says,
    gradients_of_micro_batches_are_reduced_once,
    gradients_on_their_way_stay_within_the_limit_of_the_guide,
    new_values_of_many_layers_are_published_in_few_calls, reports_of_a_divided_model_send_nothing,
    the_first_pass_gathers_every_parameter_alone,
};
use other_threads::{
    a_divided_model_in_two_threads_of_a_rank_at_once_is_rejected,
    a_whole_model_may_be_evaluated_by_another_thread_while_a_pass_waits,
    reports_do_not_wait_for_passes_that_wait_for_other_ranks,
};
use rejections::{
    a_backward_pass_whose_gradients_nothing_averages_is_rejected,
    a_failure_in_a_forward_pass_is_returned_by_the_next_step_or_save,
    a_layer_is_unfrozen_in_a_model_that_is_divided_anew,
    a_parameter_that_one_rank_does_not_use_is_named,
    a_parameter_that_was_taken_out_of_its_division_is_nan,
    a_rank_that_can_not_divide_a_model_stops_all_ranks,
    a_rank_that_evaluates_alone_is_rejected_where_parameters_are_owned,
    a_rank_that_fails_at_any_event_stops_all_ranks, any_call_of_one_rank_alone_is_found_at_once,
    averages_and_abandoned_passes_do_not_disturb_training,
    calls_of_one_rank_alone_are_compared_with_those_of_the_others_at_once,
    delays_in_passes_do_not_change_results, discarded_passes_and_whole_models_leave_no_trace,
    gradients_that_were_not_collected_are_rejected, layers_in_other_places_are_rejected,
    meshes_and_layouts_that_do_not_fit_are_rejected,
    micro_batches_in_half_precision_need_gradients_in_float32,
    models_that_a_layout_has_not_divided_are_rejected, ranks_may_start_from_clones_of_one_model,
    ranks_of_other_groups_are_told_of_a_difference,
    ranks_whose_passes_differ_are_rejected_naming_the_parameter,
    settings_of_messages_that_no_pass_sends_are_rejected,
};
use rows::{
    a_rank_holds_its_rows_of_every_parameter_also_with_fewer_matrices,
    averages_of_rows_are_those_of_whole_parameters,
    elements_of_rows_are_mapped_as_those_of_whole_parameters,
    every_part_of_the_update_is_exact_for_rows, parameters_in_rows_train_as_replicated_ones,
    parameters_with_seven_dimensions_stay_on_all_ranks, rows_may_be_uneven_or_none,
    rows_that_do_not_fit_are_rejected,
};

pub const IN_PROCESS: &[Case] = cases![
    a_device_without_gradient_checkpointing_is_warned_of,
    passes_that_are_not_trained_are_warned_of,
    a_rank_holds_and_sends_its_share,
    a_rank_of_a_node_holds_its_share,
    a_pass_of_many_layers_makes_few_calls_that_send_each_gradient_once,
    a_large_gradient_is_sent_once_and_its_sum_once_more,
    a_parameter_of_more_than_half_of_the_limit_is_sent_alone,
    a_weight_is_gathered_for_each_of_its_uses,
    a_whole_model_is_gathered_one_parameter_after_the_other,
    dropped_passes_hold_what_the_guide_says,
    an_iteration_sends_what_the_guide_says,
    gradients_of_micro_batches_are_reduced_once,
    reports_of_a_divided_model_send_nothing,
    the_first_pass_gathers_every_parameter_alone,
    new_values_of_many_layers_are_published_in_few_calls,
    an_evaluation_gathers_ahead_in_its_own_order,
    an_older_model_can_be_trained_again,
    a_model_whose_values_have_made_room_for_later_ones_is_rejected,
    states_of_users_optimizers_are_saved_with_owned_parameters,
    meshes_and_layouts_that_do_not_fit_are_rejected,
    settings_of_messages_that_no_pass_sends_are_rejected,
    models_that_a_layout_has_not_divided_are_rejected,
    gradients_that_were_not_collected_are_rejected,
    a_backward_pass_whose_gradients_nothing_averages_is_rejected,
    a_failure_in_a_forward_pass_is_returned_by_the_next_step_or_save,
    micro_batches_in_half_precision_need_gradients_in_float32,
    a_parameter_that_was_taken_out_of_its_division_is_nan,
    layers_in_other_places_are_rejected,
    a_parameter_that_one_rank_does_not_use_is_named,
    ranks_whose_passes_differ_are_rejected_naming_the_parameter,
    ranks_may_start_from_clones_of_one_model,
    ranks_of_other_groups_are_told_of_a_difference,
    a_rank_that_can_not_divide_a_model_stops_all_ranks,
    discarded_passes_and_whole_models_leave_no_trace,
    a_layer_is_unfrozen_in_a_model_that_is_divided_anew,
    a_rank_that_fails_at_any_event_stops_all_ranks,
    delays_in_passes_do_not_change_results,
    averages_and_abandoned_passes_do_not_disturb_training,
    parameters_with_new_identities_are_trained,
    gradients_under_other_identities_are_rejected,
    micro_batches_of_other_values_are_rejected,
    values_of_other_models_at_one_place_are_rejected,
    an_average_that_one_rank_has_changed_alone_is_rejected,
    averages_are_those_of_whole_parameters,
    averages_of_half_precision_are_in_float32,
    any_call_of_one_rank_alone_is_found_at_once,
    calls_of_one_rank_alone_are_compared_with_those_of_the_others_at_once,
    a_divided_base_is_held_in_parts_and_never_reduced,
    places_of_frozen_parameters_are_checked,
    loads_of_a_mixture_of_widths_are_balanced_by_their_costs,
    owners_of_a_divided_model_are_those_of_its_balancing,
    neighbouring_matrices_have_owners_in_node_order,
    experts_in_slices_have_owners_among_the_ranks_that_hold_them,
    a_table_of_owners_that_are_chosen_together_waits_for_the_division,
    a_checkpoint_of_one_balancing_continues_under_another_in_a_new_process,
    a_rank_holds_its_rows_of_every_parameter_also_with_fewer_matrices,
    rows_may_be_uneven_or_none,
    elements_of_rows_are_mapped_as_those_of_whole_parameters,
    parameters_with_seven_dimensions_stay_on_all_ranks,
    averages_of_rows_are_those_of_whole_parameters,
    rows_that_do_not_fit_are_rejected,
    reports_do_not_wait_for_passes_that_wait_for_other_ranks,
    a_divided_model_in_two_threads_of_a_rank_at_once_is_rejected,
    a_whole_model_may_be_evaluated_by_another_thread_while_a_pass_waits,
    a_rank_that_evaluates_alone_is_rejected_where_parameters_are_owned,
];

const WIDTH: usize = 16;
const TOKENS: usize = 37;

/// A model with the layers that use their parameters in different ways.
#[derive(Module, Debug)]
pub struct Net {
    /// Also the output head.
    embedding: Embedding,
    conv: Conv1d,
    norm: LayerNorm,
    /// Used twice in a pass.
    twice: Linear,
    wide: Linear,
    feed: PositionWiseFeedForward,
    experts: Param<Tensor<3>>,
    never: Linear,
    /// Used without gradients only.
    evaluated: Linear,
}

impl Net {
    pub fn new(device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        let experts = Tensor::random([3, WIDTH, WIDTH], Distribution::Normal(0.0, 0.1), device);
        let net = Self {
            embedding: EmbeddingConfig::new(TOKENS, WIDTH).init(device),
            conv: Conv1dConfig::new(WIDTH, WIDTH, 3).init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            twice: linear(WIDTH, WIDTH),
            wide: linear(WIDTH, 40),
            feed: PositionWiseFeedForwardConfig::new(40, 24).with_dropout(0.0).init(device),
            experts: Param::from_tensor(experts.require_grad()),
            never: linear(WIDTH, WIDTH),
            evaluated: linear(40, TOKENS),
        };
        net.map(&mut Fixed::new(11))
    }

    fn of(dtype: DType, device: &Device) -> Self {
        let net = Self::new(device);
        if dtype == DType::F32 { net } else { net.map(&mut Rounded(dtype)) }
    }

    fn features(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.embedding.forward(tokens);
        let x = self.conv.forward(x.swap_dims(1, 2)).swap_dims(1, 2);
        let x = self.norm.forward(relu(self.twice.forward(x)));
        let x = relu(self.twice.forward(x));
        let experts = self.experts.val().mean_dim(0).squeeze_dim::<2>(0);
        let x = x.matmul(experts.unsqueeze());
        self.feed.forward(self.wide.forward(x))
    }

    pub fn loss(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
        let [batch, length] = tokens.dims();
        let features = self.features(tokens).slice([0..batch, 0..length - 2, 0..WIDTH]);
        let logits = features.matmul(self.embedding.weight.val().transpose().unsqueeze());
        logits.square().mean()
    }

    fn evaluate(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
        self.evaluated.forward(self.features(tokens)).square().mean()
    }
}

/// The tokens of a rank in a micro-batch.
pub fn tokens(rank: usize, step: usize, device: &Device) -> Tensor<2, Int> {
    let token = |index: usize| ((index * 7 + rank * 11 + step * 5 + index * index) % TOKENS) as i64;
    Tensor::from_data(TensorData::new((0..12).map(token).collect::<Vec<_>>(), [2, 6]), device)
}

pub fn config() -> DistMuonConfig {
    let muon = MuonConfig::new()
        .with_rule(RoutingRule::muon("experts").batch())
        .with_rule(RoutingRule::muon(r"^conv\.weight").flatten());
    DistMuonConfig::new().with_muon(muon).with_small_elements(64).with_bucket_mb(Some(0.002))
}

pub fn layout(world: &World) -> Layout {
    Layout::new(&Mesh::flat(world)).owned("dp").with_muon(config().muon).with_small_elements(64)
}

/// A layout with replicas of the parts on every node.
pub fn layout_on(mesh: &Mesh) -> Layout {
    Layout::new(mesh).owned("gpu").with_muon(config().muon).with_small_elements(64)
}

/// A run's losses and final weights, as bits.
pub type Run = (Vec<Vec<u8>>, Vec<Vec<u8>>);

impl Net {
    /// The bits of the loss without gradients.
    fn evaluated(&self, world: &World, step: usize) -> Vec<u8> {
        let device = world.device().clone().inner();
        bits(&self.valid().evaluate(tokens(world.rank(), step, &device)))
    }
}

/// Trains with a layout. Several micro-batches are accumulated.
pub fn train_on(
    world: &World,
    layout: &Layout,
    config: &DistMuonConfig,
    steps: usize,
    micro_batches: usize,
    dtype: DType,
) -> Result<Run> {
    let device = world.device();
    let mut net = layout.shard(Net::of(dtype, device))?;
    let mut optim = config.init_on(layout, &net)?;
    let mut losses = vec![];
    for step in 0..steps {
        for batch in 1..micro_batches {
            let loss = net.loss(tokens(world.rank(), 100 * step + batch, device));
            layout.accumulate(&(loss.clone() * optim.loss_scale()), &net)?;
            losses.push(bits(&loss));
        }
        let loss = net.loss(tokens(world.rank(), step, device));
        let gradients = layout.backward(&(loss.clone() * optim.loss_scale()), &net)?;
        losses.push(bits(&loss));
        net = optim.step(0.01, net, gradients)?;
        losses.push(net.evaluated(world, step));
    }
    Ok((losses, weights(&layout.unshard(&net)?)))
}

/// Trains with all parameters on every rank.
pub fn train_replicated(
    world: &World,
    config: &DistMuonConfig,
    steps: usize,
    micro_batches: usize,
    dtype: DType,
) -> Result<Run> {
    let device = world.device();
    let mut net = world.broadcast(Net::of(dtype, device))?;
    let mut optim = config.init(world, &net)?;
    let mut losses = vec![];
    for step in 0..steps {
        let mut buffer = GradientBuffer::new();
        for batch in 1..micro_batches {
            let loss = net.loss(tokens(world.rank(), 100 * step + batch, device));
            buffer.add(
                &net,
                GradientsParams::from_grads((loss.clone() * optim.loss_scale()).backward(), &net),
            )?;
            losses.push(bits(&loss));
        }
        let loss = net.loss(tokens(world.rank(), step, device));
        buffer.add(
            &net,
            GradientsParams::from_grads((loss.clone() * optim.loss_scale()).backward(), &net),
        )?;
        losses.push(bits(&loss));
        net = optim.step(0.01, net, buffer.take_sum())?;
        losses.push(net.evaluated(world, step));
    }
    Ok((losses, weights(&net)))
}

/// The devices of the ranks, where weights may be gathered again.
pub fn with_checkpoints(world: &World) -> World {
    World::new(world.communicator(), world.device().clone().gradient_checkpointing())
}

/// Returns `true` for equal bits, or on a device that computes a matrix of a batch otherwise than
/// alone for float32 values that are nearly equal: directions in which a gradient is almost zero
/// turn rounding errors into steps of full size.
fn are_equal(expected: &[u8], values: &[u8]) -> bool {
    let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("four bytes"));
    let is_near = |(a, b): (&[u8], &[u8])| (number(a) - number(b)).abs() < 0.03;
    let all_are_near = || expected.chunks_exact(4).zip(values.chunks_exact(4)).all(is_near);
    expected == values || !is_flex() && all_are_near()
}

pub fn assert_equal(expected: &[Run], runs: &[Run], what: &str) {
    for (rank, (expected, run)) in expected.iter().zip(runs).enumerate() {
        for (expected, values, kind) in
            [(&expected.0, &run.0, "loss"), (&expected.1, &run.1, "weight")]
        {
            let mut both = expected.iter().zip(values);
            let differs = both.position(|(expected, values)| !are_equal(expected, values));
            assert_eq!(differs, None, "{what}: rank {rank} has another {kind}");
        }
    }
}

fn owned_parameters_train_as_replicated_ones() {
    for count in [1, 2, 3, 4, 7].into_iter().filter(worlds::has) {
        let config = config();
        let expected = ranks(count, |world| {
            train_replicated(&with_checkpoints(&world), &config, 10, 1, DType::F32)
        });
        let expected = expected.unwrap();
        assert!(expected[0].0[0] != expected[0].0[18], "it trains");
        for keep in [Keep::Weights, Keep::Nothing] {
            for limits in [None, Some((0.0, 64.0)), Some((64.0, 0.006)), Some((0.004, 0.0))] {
                let runs = ranks(count, |world| {
                    let world = with_checkpoints(&world);
                    let layout = layout(&world).with_keep(keep);
                    let layout = limits.into_iter().fold(layout, |layout, (ahead, in_flight)| {
                        layout.with_ahead_mb(ahead).with_in_flight_mb(in_flight)
                    });
                    train_on(&world, &layout, &config, 10, 1, DType::F32)
                });
                let what = format!("{count} ranks, {keep:?}, {limits:?}");
                assert_equal(&expected, &runs.unwrap(), &what);
            }
        }
    }
}

fn micro_batches_of_owned_parameters_are_added_up_before_they_are_reduced() {
    let config = config();
    let expected = ranks(2, |world| train_replicated(&world, &config, 4, 3, DType::F32)).unwrap();
    for (keep, in_rows) in [(Keep::Weights, false), (Keep::Nothing, false), (Keep::Nothing, true)] {
        let runs = ranks(2, |world| {
            let world = with_checkpoints(&world);
            let layout = layout(&world).with_keep(keep);
            let layout = if in_rows { layout.rows("dp") } else { layout };
            train_on(&world, &layout, &config, 4, 3, DType::F32)
        });
        assert_equal(&expected, &runs.unwrap(), &format!("{keep:?}, in rows: {in_rows}"));
    }
}

fn owned_parameters_in_half_precision_are_clipped_and_scaled_as_replicated_ones() {
    let with = |master: MasterWeights| {
        let muon = config().muon.with_master_weights(master);
        config().with_muon(muon).with_grad_dtype(GradDtype::Float32).with_max_norm(Some(0.05))
    };
    let scale = LossScaleConfig::new().with_initial(4e6).with_backoff(0.01);
    for (dtype, config) in [
        (DType::F32, config().with_max_norm(Some(0.05))),
        (DType::BF16, with(MasterWeights::Full)),
        (DType::BF16, with(MasterWeights::Mantissa)),
        (DType::F16, with(MasterWeights::Full).with_loss_scale(Some(scale))),
    ] {
        for micro_batches in [1, 2] {
            let expected =
                ranks(2, |world| train_replicated(&world, &config, 5, micro_batches, dtype));
            let expected = expected.unwrap();
            assert!(expected[0].1 != weights(&Net::of(dtype, &device())), "it trains");
            for in_rows in [false, true] {
                let runs = ranks(2, |world| {
                    let world = with_checkpoints(&world);
                    let layout = layout(&world).with_muon(config.muon.clone());
                    let layout = if in_rows { layout.rows("dp") } else { layout };
                    train_on(&world, &layout, &config, 5, micro_batches, dtype)
                });
                let what = format!("{dtype:?}, {micro_batches} micro-batches, {config}");
                assert_equal(&expected, &runs.unwrap(), &format!("{what}, in rows: {in_rows}"));
            }
        }
    }
}

fn gradients_that_the_backward_pass_reduces_are_those_of_the_step() {
    for count in [1, 2, 3, 4].into_iter().filter(worlds::has) {
        for publish in [Publish::Now, Publish::AtFirstUse] {
            let config = config().with_publish(publish);
            let replicated = Layout::new as fn(&Mesh) -> Layout;
            let mixed = |mesh: &Mesh| {
                let layout = Layout::new(mesh).owned("dp");
                layout.with_place(Place::replicated("wide|experts|embedding"))
            };
            for micro_batches in [1, 2] {
                let expected = ranks(count, |world| {
                    train_replicated(&world, &config, 5, micro_batches, DType::F32)
                });
                let expected = expected.unwrap();
                for layout in [&replicated as &(dyn Fn(&Mesh) -> Layout + Sync), &mixed] {
                    let runs = ranks(count, |world| {
                        let world = with_checkpoints(&world);
                        let layout = layout(&Mesh::flat(&world))
                            .overlap_backward()
                            .with_muon(config.muon.clone())
                            .with_small_elements(64);
                        train_on(&world, &layout, &config, 5, micro_batches, DType::F32)
                    });
                    let what = format!("{count} ranks, {publish:?}, {micro_batches}");
                    assert_equal(&expected, &runs.unwrap(), &what);
                }
            }
        }
    }
}

/// A mesh of two nodes.
fn nodes(world: &World) -> Result<Mesh> {
    Mesh::new(world, [Axis::data("node", 2), Axis::data("gpu", world.size() / 2)])
}

fn parameters_owned_inside_nodes_train_as_replicated_ones() {
    let config = config();
    for count in [2, 4, 8].into_iter().filter(worlds::has) {
        let expected =
            ranks(count, |world| train_replicated(&world, &config, 5, 1, DType::F32)).unwrap();
        for publish in [Publish::Now, Publish::AtFirstUse] {
            for (ahead_mb, axis) in
                [(0.0, "gpu"), (0.004, "gpu"), (64.0, "gpu"), (0.0, "gpu rows"), (64.0, "gpu rows")]
            {
                let config = config.clone().with_publish(publish);
                let runs = ranks(count, |world| {
                    let world = with_checkpoints(&world);
                    let layout = layout_by(&world, Some(axis))?.with_ahead_mb(ahead_mb);
                    train_on(&world, &layout, &config, 5, 1, DType::F32)
                });
                let what = format!("{count} ranks, {publish:?}, {ahead_mb}, {axis}");
                assert_equal(&expected, &runs.unwrap(), &what);
            }
        }
    }
}

/// Means over a node and over nodes round twice, unless they divide by powers of two.
fn parameters_owned_inside_three_nodes_or_by_three_ranks_train_nearly_as_replicated_ones() {
    if !worlds::has(&6) {
        return;
    }
    let expected = ranks(6, |world| train_replicated(&world, &config(), 4, 1, DType::F32)).unwrap();
    for (nodes, gpus) in [(2, 3), (3, 2)] {
        let runs = ranks(6, |world| {
            let world = with_checkpoints(&world);
            let axes = [Axis::data("node", nodes), Axis::data("gpu", gpus)];
            train_on(&world, &layout_on(&Mesh::new(&world, axes)?), &config(), 4, 1, DType::F32)
        });
        let runs = runs.unwrap();
        assert!(runs.iter().all(|run| run.1 == runs[0].1), "the ranks agree");
        let floats = |bits: &[Vec<u8>]| -> Vec<f32> {
            let bytes = bits.concat();
            let numbers = bytes.chunks_exact(4);
            numbers.map(|bytes| f32::from_le_bytes(bytes.try_into().expect("4 bytes"))).collect()
        };
        let errors = floats(&expected[0].1).into_iter().zip(floats(&runs[0].1));
        let error = errors.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // A sum that is rounded otherwise may turn a gradient that is almost zero.
        assert!(error < 1e-3, "{nodes} nodes of {gpus}: {error}");
    }
}

/// Ranks 0 and 1 are a host, and ranks 2 and 3 another.
fn on_hosts(world: &World) -> Result<World> {
    with_checkpoints(world).by_node(&(world.rank() / 2).to_string())
}

fn parameters_owned_on_several_hosts_train_as_replicated_ones() {
    if !worlds::has(&4) {
        return;
    }
    let config = config();
    let expected =
        ranks(4, |world| train_replicated(&on_hosts(&world)?, &config, 4, 1, DType::F32)).unwrap();
    for publish in [Publish::Now, Publish::AtFirstUse] {
        let config = config.clone().with_publish(publish);
        for is_owned in [true, false] {
            let runs = ranks(4, |world| {
                let world = on_hosts(&world)?;
                let mesh = Mesh::flat(&world);
                let layout = if is_owned { layout(&world) } else { Layout::new(&mesh) };
                let layout = layout.overlap_backward().with_muon(config.muon.clone());
                train_on(&world, &layout, &config, 4, 1, DType::F32)
            });
            assert_equal(&expected, &runs.unwrap(), &format!("{publish:?}, {is_owned}"));
        }
    }
}

fn sums_of_parts_are_those_of_whole_gradients() {
    sums_of_parts_are_those_of_whole_gradients_of(DType::F32);
    if has(FloatDType::BF16) {
        sums_of_parts_are_those_of_whole_gradients_of(DType::BF16);
    }
}

/// Sums are in float32 for any type.
fn sums_of_parts_are_those_of_whole_gradients_of(dtype: DType) {
    // With equal data, the mean over a power of two of ranks is exact.
    let config = config().with_grad_dtype(GradDtype::Float32);
    let train = |axis: Option<&'static str>, overlaps: bool| {
        let run = ranks(4, |world| {
            let world = with_checkpoints(&world);
            let layout = layout_by(&world, axis)?;
            let layout = if overlaps { layout.overlap_backward() } else { layout };
            let mut net = layout.shard(Net::of(dtype, world.device()))?;
            let mut optim = config.init_on(&layout, &net)?;
            for step in 0..3 {
                let mut buffer = GradientBuffer::new();
                for batch in 0..2 {
                    let loss = net.loss(tokens(batch, step, world.device()));
                    buffer.add(&net, layout.backward(&loss, &net)?)?;
                }
                let gradients = buffer.take_mean(&net);
                net = optim.step(0.01, net, gradients)?;
            }
            Ok((vec![], weights(&layout.unshard(&net)?)))
        });
        run.unwrap()
    };
    if !worlds::has(&4) {
        return;
    }
    let expected = train(None, false);
    for (axis, overlaps) in
        [(None, true), (Some("dp"), false), (Some("gpu"), true), (Some("dp rows"), false)]
    {
        assert_equal(&expected, &train(axis, overlaps), &format!("{axis:?}, {overlaps}"));
    }
}

type Lay = fn(Layout) -> Layout;

/// The layouts whose passes reduce gradients, and whether they divide the parameters.
const IN_PASSES: [(bool, Lay); 3] = [
    (false, Layout::overlap_backward),
    (true, |layout| layout.owned("dp")),
    (true, |layout| layout.rows("dp")),
];

fn rounded_means_are_those_in_float32_in_the_type_of_parameters() {
    const LAYERS: usize = 3;
    if !has(FloatDType::BF16) {
        return;
    }
    let counts = [2, 3, 4].into_iter().filter(worlds::has);
    let cases =
        counts.flat_map(|count| IN_PASSES.map(|(is_divided, lay)| (count, is_divided, lay)));
    for (count, is_divided, lay) in cases {
        // The means of two passes, in which every rank has other data, and the new weights.
        let train = |rounds: bool| {
            let run = ranks(count, |world| {
                let world = with_checkpoints(&world);
                let layout = lay(Layout::from(&world));
                let layout = if rounds { layout.round_means() } else { layout };
                let net = Layers::square(LAYERS, 32, world.device()).map(&mut Fixed::new(5));
                let net = net.map(&mut Rounded(DType::BF16));
                // A rank looks for the gradient of its part under the whole parameter's identity.
                let ids: Vec<_> = net.layers.iter().map(|layer| layer.weight.id).collect();
                let (mut net, mut optim) = DistMuonConfig::new().start(&layout, net)?;
                let mut means = vec![];
                for step in 1..=2 {
                    let scale = 0.37 * (world.rank() + step) as f64;
                    let input = ones(world.device()).mul_scalar(scale).cast(DType::BF16);
                    let mut grads = optim.backward(&output(&net, input), &net)?;
                    for id in &ids {
                        // A part has one dimension, and a whole parameter two.
                        let mean = match is_divided {
                            true => grads.remove::<1>(*id),
                            false => grads.remove::<2>(*id).map(|mean| mean.flatten::<1>(0, 1)),
                        };
                        let Some(mean) = mean else { continue };
                        assert_eq!(mean.dtype(), if rounds { DType::BF16 } else { DType::F32 });
                        let rounded = mean.clone().cast(DType::BF16);
                        let wide = rounded.clone().cast(DType::F32);
                        let digits = bits(&wide) != bits(&mean.cast(DType::F32));
                        means.push((bits(&rounded), digits));
                        match is_divided {
                            true => grads.register(*id, rounded),
                            false => grads.register(*id, rounded.unsqueeze_dim::<2>(1)),
                        }
                    }
                    net = optim.step(0.01, net, grads)?;
                }
                Ok((means, weights(&layout.unshard(&net)?)))
            });
            run.unwrap()
        };
        let (wide, rounded) = (train(false), train(true));
        assert!(wide.iter().flat_map(|(means, _)| means).any(|(_, has_digits)| *has_digits));
        for ((wide, expected), (rounded, weights)) in wide.into_iter().zip(rounded) {
            assert!(rounded.iter().all(|(_, has_digits)| !has_digits));
            let values = |means: Vec<(Vec<u8>, bool)>| -> Vec<_> {
                means.into_iter().map(|(values, _)| values).collect()
            };
            assert_eq!(values(rounded), values(wide), "{count} ranks");
            assert_eq!(weights, expected, "{count} ranks");
        }
    }
}

/// Square matrices one after the other, in float32 on every device.
fn layers(device: &Device) -> Layers {
    Layers::square(16, 32, device).map(&mut Fixed::new(5))
}

/// An input of [`layers`].
fn ones(device: &Device) -> Tensor<3> {
    Tensor::ones([2, 3, 32], (device, DType::F32))
}

fn output(net: &Layers, input: Tensor<3>) -> Tensor<1> {
    net.layers.iter().fold(input, |x, layer| relu(layer.forward(x))).square().mean()
}

fn a_rank_holds_and_sends_its_share() {
    const BYTES: usize = 16 * 32 * 32 * 4;
    let is_exact = worlds::is_exact();
    for count in [1, 2, 4, 8] {
        for keep in [Keep::Weights, Keep::Nothing] {
            for ahead in [0, 2] {
                let sent_and_held = ranks_here(count, |world| {
                    let (comm, traffic) = counted(world.communicator());
                    let world = World::new(comm, world.device().clone().gradient_checkpointing());
                    let layout = Layout::new(&Mesh::flat(&world))
                        .owned("dp")
                        .with_keep(keep)
                        .with_ahead_mb((ahead * BYTES / 16) as f64 / 1e6)
                        .with_in_flight_mb(0.0);
                    let mut net = layout.shard(layers(world.device()))?;
                    let mut optim = DistMuonConfig::new().init_on(&layout, &net)?;
                    let input = ones(world.device());
                    for _ in 0..2 {
                        traffic.lock().unwrap().clear();
                        let gradients = layout.backward(&output(&net, input.clone()), &net)?;
                        let passes = std::mem::take(&mut *traffic.lock().unwrap());
                        net = optim.step(0.01, net, gradients)?;
                        let step = std::mem::take(&mut *traffic.lock().unwrap());
                        // The counts of skipped steps: two numbers for each parameter.
                        assert!(step.values().sum::<usize>() <= 4 * 2 * 16 * 4, "{step:?}");
                        let passes: usize = passes.values().sum();
                        let times = if keep == Keep::Nothing { 3 } else { 2 };
                        let most = times * (count - 1) * BYTES / count;
                        // The first layer's weight is not used in the backward pass, since the
                        // input has no gradient. NCCL's own reductions may send more.
                        let unused = if keep == Keep::Nothing { BYTES / 16 } else { 0 };
                        let is_share = (most.saturating_sub(unused)..=most).contains(&passes);
                        assert!(is_share || !is_exact, "{passes} of {most}");
                    }
                    Ok(optim.memory())
                });
                for memory in sent_and_held.unwrap() {
                    let share = BYTES / count;
                    // A parameter of which the rank has nothing has an element.
                    let parts = share + 4 * (16 - 16 / count);
                    assert_eq!((memory.parameters.now, memory.states.now), (parts, share));
                    assert_eq!((memory.gathered.now, memory.in_flight.now), (0, 0));
                    // The one in use, or those ahead.
                    assert_eq!(memory.gathered.peak, ahead.max(1) * BYTES / 16, "{memory}");
                    // A gradient as it was computed, and the buffers of the one before: `nccl`
                    // receives those of all ranks to add them up exactly.
                    let gradient = BYTES / 16;
                    let most = (3 + count) * gradient;
                    assert!((gradient..=most).contains(&memory.in_flight.peak), "{memory}");
                    assert!(memory.shards.peak <= share && memory.gradients.peak <= share);
                }
            }
        }
    }
}

/// Replicas of the parts on every node: a rank has those of its node, and updates a share of them.
fn a_rank_of_a_node_holds_its_share() {
    const BYTES: usize = 16 * 32 * 32 * 4;
    let held = ranks_here(4, |world| {
        let world = with_checkpoints(&world);
        let mesh = Mesh::new(&world, [Axis::data("node", 2), Axis::data("gpu", 2)])?;
        let layout = Layout::new(&mesh).owned("gpu").with_ahead_mb(0.0).with_in_flight_mb(0.0);
        let mut net = layout.shard(layers(world.device()))?;
        let mut optim = DistMuonConfig::new().init_on(&layout, &net)?;
        for _ in 0..2 {
            let loss = output(&net, ones(world.device()));
            net = optim.step(0.01, net.clone(), layout.backward(&loss, &net)?)?;
        }
        Ok(optim.memory())
    });
    for memory in held.unwrap() {
        // A parameter of which the rank has nothing has an element.
        assert_eq!(memory.parameters.now, BYTES / 2 + 4 * 8, "{memory}");
        assert_eq!(memory.states.now, BYTES / 4, "{memory}");
        assert_eq!(memory.gradients.peak, BYTES / 4, "{memory}");
        assert!(memory.shards.peak <= BYTES / 4, "{memory}");
        assert_eq!(memory.gathered.peak, BYTES / 16, "{memory}");
    }
}

/// The gathers that have begun once each layer of a pass without gradients has been used, and the
/// bits of the output. The layers come in the opposite order of the training pass.
fn gathers_of_evaluation(
    net: &Layers,
    started: &AtomicUsize,
    device: &Device,
) -> (Vec<usize>, Vec<u8>) {
    started.store(0, SeqCst);
    let mut x = ones(&device.clone().inner());
    let mut seen = vec![];
    for layer in net.layers.iter().rev() {
        x = relu(layer.forward(x));
        seen.push(started.load(SeqCst));
    }
    (seen, bits(&x))
}

fn an_evaluation_gathers_ahead_in_its_own_order() {
    const BYTES: usize = 32 * 32 * 4;
    // Those that have been used, and those that come next.
    let ahead_of = |next: usize| (1..=16).map(|used| (used + next).min(16)).collect::<Vec<_>>();
    let alone = ahead_of(0);
    // In the last case, one for all but the first.
    let together = vec![2; 16];
    for count in [2, 3] {
        for (limit, calls_ahead) in
            [(0, alone.clone()), (1, alone.clone()), (3, ahead_of(2)), (100, together.clone())]
        {
            let run = ranks_here(count, |world| {
                let started = Arc::new(AtomicUsize::new(0));
                let calls = started.clone();
                let world = watched(&world, move |event| {
                    let starts = event.collective == "all_gather" && !event.waits;
                    calls.fetch_add(usize::from(starts), SeqCst);
                    Ok(())
                });
                let device = world.device();
                let layout = Layout::new(&Mesh::flat(&world))
                    .owned("dp")
                    .with_ahead_mb((limit * BYTES) as f64 / 1e6);
                let mut net = layout.shard(layers(device))?;
                let mut optim = DistMuonConfig::new().init_on(&layout, &net)?;
                let case = format!("{count} ranks, {limit} at most");
                for step in 0..3 {
                    let case = format!("{case}, step {step}");
                    let whole = layout.unshard(&net)?.valid();
                    let evaluate = |net: &Layers| gathers_of_evaluation(net, &started, device);
                    let (_, expected) = evaluate(&whole);
                    // A part that was not evaluated yet is not known to be the next.
                    for known in [false, true, true] {
                        let (seen, output) = evaluate(&net.valid());
                        let calls = if known { &calls_ahead } else { &alone };
                        assert_eq!(&seen, calls, "{case}");
                        assert_eq!(output, expected, "{case}");
                    }
                    // Other values are gathered once, as those of the model after them.
                    let other = layout.average(net.clone(), &net, 0.5)?;
                    for evaluated in [&other, &net] {
                        assert_eq!(evaluate(&evaluated.valid()).0, alone, "{case}");
                    }
                    assert_eq!(evaluate(&net.valid()).0, calls_ahead, "{case}");
                    let loss = output(&net, Tensor::from_inner(ones(&device.clone().inner())));
                    let gradients = layout.backward(&loss, &net)?;
                    net = optim.step(0.01, net, gradients)?;
                }
                let gathered = optim.memory().gathered;
                assert!(gathered.peak <= limit.max(1) * BYTES, "{case}: {gathered:?}");
                // A layer that is used first and last leaves those behind it gathered.
                let mut tied = net.valid();
                for _ in 0..2 {
                    let x = ones(&device.clone().inner());
                    let x = tied.layers.iter().fold(x, |x, layer| layer.forward(x));
                    drop(tied.layers[0].forward(x));
                    tied = net.valid();
                }
                let left = optim.memory().gathered.now;
                let loss = output(&net, Tensor::from_inner(ones(&device.clone().inner())));
                layout.backward(&loss, &net)?;
                Ok([gathered.now, left, optim.memory().gathered.now])
            });
            let leaves = limit >= 2;
            for [before, left, after] in run.unwrap() {
                assert_eq!((before, left > 0, after), (0, leaves, 0), "{limit}: {left}");
                assert!(left <= limit * BYTES, "{left}");
            }
        }
    }
}

/// The ways in which ranks have a model: their number, and the axis along which it is divided, in
/// rows or whole at owners, or that its gradients are reduced in the backward pass.
const LAYOUTS: [(usize, Option<&str>); 10] = [
    (1, None),
    (4, None),
    (1, Some("dp")),
    (3, Some("dp")),
    (4, Some("dp")),
    (4, Some("gpu")),
    (2, Some("dp rows")),
    (4, Some("gpu rows")),
    (2, Some("overlap")),
    (4, Some("overlap")),
];

/// The layout of one of [`LAYOUTS`].
fn layout_by(world: &World, axis: Option<&str>) -> Result<Layout> {
    let layout = |mesh: &Mesh| Layout::new(mesh).with_muon(config().muon).with_small_elements(64);
    Ok(match axis {
        None => layout(&Mesh::flat(world)),
        Some("dp") => layout(&Mesh::flat(world)).owned("dp"),
        Some("dp rows") => layout(&Mesh::flat(world)).rows("dp"),
        Some("overlap") => layout(&Mesh::flat(world)).overlap_backward(),
        Some("gpu rows") => layout(&nodes(world)?).rows("gpu"),
        Some(axis) => layout(&nodes(world)?).owned(axis),
    })
}

/// Takes steps, with the same data on all ranks.
fn advance(
    layout: &Layout,
    (mut net, mut optim): (Net, DistModuleOptimizer),
    steps: std::ops::Range<usize>,
) -> Result<(Net, DistModuleOptimizer)> {
    for step in steps {
        let loss = net.loss(tokens(0, step, layout.mesh().world().device()));
        let gradients = layout.backward(&loss, &net)?;
        net = optim.step(0.01, net, gradients)?;
    }
    Ok((net, optim))
}

fn states_of_users_optimizers_are_saved_with_owned_parameters() {
    let folder = Folder::create();
    let path = folder.path().join("run.ckpt");
    let custom = config().muon.with_optimizer("adafactor", AdafactorConfig::new().build());
    let custom = custom.with_rule(RoutingRule::custom("norm", "adafactor"));
    let config = config().with_muon(custom);
    let train = |loads: bool| {
        let run = ranks_here(3, |world| {
            let world = with_checkpoints(&world);
            let layout = layout(&world).with_muon(config.muon.clone());
            let net = layout.shard(Net::new(world.device()))?;
            let optim = config.init_on(&layout, &net)?;
            let (net, optim, step) = match loads {
                true => optim.load(&path, net)?,
                false => {
                    let (net, optim) = advance(&layout, (net, optim), 0..2)?;
                    optim.save(&path, &net, &2usize)?;
                    (net, optim, 2)
                }
            };
            let (net, _) = advance(&layout, (net, optim), step..4)?;
            Ok(weights(&layout.unshard(&net)?))
        });
        run.unwrap()
    };
    let expected = train(false);
    assert!(!loads_states() || expected == train(true));
}

/// A model that two steps have returned, and the one that the next step has made of it.
fn older_and_newer(
    world: &World,
    publish: Publish,
) -> Result<(Layout, [Net; 2], DistModuleOptimizer)> {
    let world = with_checkpoints(world);
    let layout = layout_by(&world, Some("gpu"))?;
    let net = layout.shard(Net::new(world.device()))?;
    let optim = config().with_publish(publish).init_on(&layout, &net)?;
    let (older, optim) = advance(&layout, (net, optim), 0..2)?;
    let (newer, optim) = advance(&layout, (older.clone(), optim), 2..3)?;
    Ok((layout, [older, newer], optim))
}

fn an_older_model_can_be_trained_again() {
    let train = |publish: Publish| {
        let run = ranks_here(4, |world| {
            let (layout, [older, newer], optim) = older_and_newer(&world, publish)?;
            let (net, _) = advance(&layout, (older, optim), 3..5)?;
            drop(newer);
            Ok(weights(&layout.unshard(&net)?))
        });
        run.unwrap()
    };
    assert!(train(Publish::AtFirstUse) == train(Publish::Now));
}

fn a_model_whose_values_have_made_room_for_later_ones_is_rejected() {
    let unshard_newer = |publish: Publish| {
        let run = ranks_here(4, |world| {
            let (layout, [older, newer], optim) = older_and_newer(&world, publish)?;
            let (_, optim) = advance(&layout, (older, optim), 3..4)?;
            // A failure ends the steps of other ranks.
            world.comm().barrier()?;
            let outcome = layout.unshard(&newer).map(|whole| weights(&whole));
            drop(optim);
            Ok(outcome)
        });
        run.unwrap()
    };
    assert!(unshard_newer(Publish::Now).iter().all(Result::is_ok));
    for outcome in unshard_newer(Publish::AtFirstUse) {
        let text = outcome.expect_err("the values are of another step").to_string();
        assert!(text.contains("made room for the value of a later step"), "{text}");
    }
}

fn checkpoints_move_between_layouts() {
    let folder = Folder::create();
    let path = |(count, axis): (usize, Option<&str>)| {
        folder.path().join(format!("{count}-{}.ckpt", axis.unwrap_or("replicated")))
    };
    let layouts: Vec<_> = LAYOUTS.into_iter().filter(|(count, _)| worlds::has(count)).collect();
    for (count, axis) in layouts.clone() {
        let saved = ranks(count, |world| {
            let world = with_checkpoints(&world);
            let layout = layout_by(&world, axis)?;
            let net = layout.shard(Net::new(world.device()))?;
            let optim = config().init_on(&layout, &net)?;
            let (net, optim) = advance(&layout, (net, optim), 0..2)?;
            optim.save(path((count, axis)), &net, &2usize)?;
            let (net, _) = advance(&layout, (net, optim), 2..4)?;
            Ok(weights(&layout.unshard(&net)?))
        });
        let saved = saved.unwrap();
        for (other, by) in layouts.clone() {
            let loaded = ranks(other, |world| {
                let world = with_checkpoints(&world);
                let layout = layout_by(&world, by)?;
                let net = layout.shard(Net::new(world.device()))?;
                let optim = config().init_on(&layout, &net)?;
                let (net, optim, step) = optim.load(path((count, axis)), net)?;
                let (net, _) = advance(&layout, (net, optim), step..4)?;
                Ok(weights(&layout.unshard(&net)?))
            });
            // A mean over three ranks is rounded.
            let is_exact = (count == 3) == (other == 3) || [count, other].iter().all(|n| *n != 3);
            for weights in loaded.unwrap().iter().filter(|_| is_exact) {
                let mut both = saved[0].iter().zip(weights);
                let is_equal = both.all(|(saved, loaded)| are_equal(saved, loaded));
                assert!(is_equal, "{count} {axis:?} to {other} {by:?}");
            }
        }
    }
}
