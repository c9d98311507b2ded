//! The program of a mutant: its `native` module, and the checks.

mod checks;
mod driver;
mod native;

fn main() {
    checks::run();
}
