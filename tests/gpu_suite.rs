//! Every test that a GPU has to pass, as one program: what all of them link travels to a borrowed GPU once.
