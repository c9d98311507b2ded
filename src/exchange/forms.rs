//! The form of a model's parameters in files of other code bases.

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use crate::parameters::{self, Field, Visit};

/// The name and layout of a float parameter in a file.
pub struct Form {
    pub name: String,
    /// `true` if the weight is the transpose of the one in a checkpoint.
    pub transposes_weight: bool,
    /// `true` if states are the transposes of those in a checkpoint.
    pub transposes_state: bool,
}

/// The forms of a model's float parameters, by path.
pub fn of<M: Module>(model: &M, rename: &dyn Fn(&str) -> String) -> BTreeMap<String, Form> {
    let mut forms = Forms { rename, forms: BTreeMap::new() };
    parameters::visit(model, &mut forms);
    forms.forms
}

struct Forms<'a> {
    rename: &'a dyn Fn(&str) -> String,
    forms: BTreeMap<String, Form>,
}

impl Visit for Forms<'_> {
    fn visit<const D: usize>(&mut self, fields: &[Field], param: &Param<Tensor<D>>) {
        let (holder, field) = fields.last().map_or(("", ""), |last| (&*last.holder, &*last.name));
        // The parameters of Burn's layers have the layout of PyTorch's, with this exception.
        let is_linear = D == 2 && holder == "Linear" && field == "weight";
        let mut names = fields.to_vec();
        if let Some(last) = names.last_mut() {
            last.name = name_in_torch(holder, field).to_owned();
        }
        let form = Form {
            name: (self.rename)(&parameters::path(&names)),
            // A layer with `LinearLayout::Col` is stored as in PyTorch, and trained as any other.
            transposes_weight: is_linear && !is_stored_transposed(param),
            transposes_state: is_linear,
        };
        self.forms.insert(parameters::path(fields), form);
    }
}

/// The name in PyTorch of a field of a Burn layer.
fn name_in_torch<'a>(holder: &str, field: &'a str) -> &'a str {
    let is_norm =
        ["BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RmsNorm"].contains(&holder);
    match field {
        "gamma" if is_norm => "weight",
        "beta" if is_norm => "bias",
        field => field,
    }
}

/// Returns `true` if the stored form of a matrix is its transpose.
fn is_stored_transposed<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    let mut shape = [1; D];
    // A square weight does not show it, so a row of two elements takes its place.
    shape[D - 1] = 2;
    let row = |value: Tensor<D>| Tensor::zeros(shape, (&value.device().inner(), value.dtype()));
    let stored = param.clone().map(row).transform_for_save().val();
    stored.dims() != shape
}
