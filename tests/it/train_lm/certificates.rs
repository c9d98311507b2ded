//! Certificates of runs: equal on any ranks and placement where the bits are, and different after
//! anything else.

use std::fs;
use std::path::Path;

use distmuon::certificate::Certificate;

use super::{folder, rejected, succeed};

const FLAGS: &str = "--data text.rs --context 16 --batch 4 --steps 4 --eval-every 2 --sample 0";

/// The certificate of a run.
fn certified(folder: &Path, more: &str) -> Certificate {
    succeed(folder, &format!("{FLAGS} --certificate run.json {more}"));
    Certificate::read(folder.join("run.json")).unwrap()
}

#[test]
fn certificates_are_equal_on_any_ranks_where_the_sums_are() {
    let folder = folder();
    let chain = |more: &str| {
        let certificate = certified(folder.path(), more);
        let steps: Vec<usize> = certificate.links().iter().map(|link| link.step).collect();
        assert_eq!(steps, [0, 1, 2, 3, 4], "{more}");
        certificate.chain().to_owned()
    };
    // A rank adds its micro-batches up one after the other, and ranks add theirs up in pairs.
    let two = chain("--ranks 2");
    assert_eq!(chain("--ranks 1 --accumulate 2"), two);
    for placement in ["--owned dp", "--overlap"] {
        assert_eq!(chain(&format!("--ranks 2 {placement}")), two, "{placement}");
    }
    let four = chain("--ranks 4");
    assert_eq!(chain("--ranks 2 --accumulate 2"), four);
    assert_ne!(two, four, "their sums have another order");
    assert_ne!(chain("--ranks 2 --lr 0.01"), two);
    assert_ne!(chain("--ranks 2 --seed 2"), two);
}

#[test]
fn a_resumed_run_continues_its_certificate_in_a_new_process() {
    let folder = folder();
    let resume = "--data text.rs --resume run.bpk --sample 0";
    let resumed = |first: &str, second: &str| {
        succeed(
            folder.path(),
            &format!(
                "--data text.rs --context 16 --batch 4 --steps 2 --sample 0 --save run.bpk \
                 --certificate run.json {first}"
            ),
        );
        let before = Certificate::read(folder.path().join("run.json")).unwrap();
        let more = format!("{resume} --steps 4 --certificate run.json {second}");
        succeed(folder.path(), &more);
        let after = Certificate::read(folder.path().join("run.json")).unwrap();
        assert_eq!(after.links()[..3], *before.links(), "{first}, then {second}");
        assert_eq!((after.links().len(), after.ranks().len()), (5, 2), "both parts are named");
        after.chain().to_owned()
    };
    let expected = resumed("--ranks 2", "--ranks 2");
    assert_eq!(resumed("--ranks 1 --accumulate 2", "--ranks 2 --owned dp"), expected);
    assert_eq!(resumed("--ranks 2 --overlap", "--ranks 2"), expected);
    assert_eq!(resumed("--ranks 2", "--ranks 1 --accumulate 2"), expected);

    let other = Certificate::new(&"another run", 0);
    other.write(folder.path().join("other.json")).unwrap();
    fs::write(folder.path().join("damaged.json"), "{}").unwrap();
    for (file, expected) in [
        ("other.json", "the certificate is of another run"),
        ("damaged.json", "it is no certificate"),
    ] {
        let more = format!("{resume} --steps 4 --certificate {file}");
        rejected(folder.path(), &more, expected);
    }
}
