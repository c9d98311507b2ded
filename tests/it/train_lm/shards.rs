//! Shards of tokens.

use std::fs;
use std::path::Path;

use super::{curve, folder, rejected, succeed, succeed_with_output};

/// Writes a shard of a text, whose bytes are the tokens.
fn shard(path: &Path, header: [i32; 3], tokens: &[u16]) {
    let mut bytes: Vec<u8> = header.into_iter().flat_map(i32::to_le_bytes).collect();
    bytes.resize(1024, 0);
    bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    fs::write(path, bytes).unwrap();
}

fn tokens(count: usize, seed: usize) -> Vec<u16> {
    (0..count).map(|index| ((index * index + seed * index) % 97) as u16).collect()
}

const MAGIC: i32 = 20_240_520;

#[test]
fn shards_are_read_in_order_and_continued_at_the_byte() {
    let folder = folder();
    let shards = folder.path().join("shards");
    fs::create_dir(&shards).unwrap();
    // Batches lie across two files.
    for (name, count, seed) in
        [("train_1.bin", 700, 1), ("train_2.bin", 900, 2), ("val_0.bin", 1200, 3)]
    {
        shard(&shards.join(name), [MAGIC, 1, count as i32], &tokens(count, seed));
    }
    let flags = "--data shards --vocabulary 97 --context 32 --batch 8 --eval-every 1 --sample 4";
    let run = |more: &str| succeed_with_output(folder.path(), &format!("{flags} {more}")).1;
    let first = run("--steps 5 --save whole.bpk");
    assert!(first.contains("shards: 3 files, 2800 tokens"), "{first}");
    run("--steps 3 --save part.bpk");
    let resumed = "--resume part.bpk --steps 5 --eval-every 1 --sample 0 --save rest.bpk";
    let (_, resumed) = succeed_with_output(folder.path(), resumed);
    // Three batches of 256 tokens lie behind, 700 of them in the first file.
    let expected = format!("at byte {} of", 1024 + 2 * (3 * 256 - 700));
    assert!(resumed.contains(&expected) && resumed.contains("train_2.bin"), "{resumed}");
    // Ranks divide a batch.
    run("--steps 5 --ranks 2 --save ranks.bpk");
    let curves =
        ["whole.bpk", "rest.bpk", "ranks.bpk"].map(|name| curve(&folder.path().join(name)));
    let [whole, rest, ranks] = curves;
    assert_eq!(whole.len(), 6);
    // The schedule of the learning rate is that of another number of steps before.
    assert_eq!(whole[0], rest[0]);
    for ((_, one), (_, two)) in whole.iter().zip(&ranks) {
        let [one, two] = [one, two].map(|loss| loss.expect("a number"));
        assert!((one - two).abs() < 1e-3 * one, "{whole:?}, {ranks:?}");
    }
}

#[test]
fn a_run_that_was_interrupted_sees_the_same_tokens() {
    let folder = folder();
    shard(&folder.path().join("one.bin"), [MAGIC, 1, 12_000], &tokens(12_000, 5));
    // A constant rate, whatever the number of steps.
    let flags = "--data one.bin --vocabulary 97 --context 32 --batch 4 --eval-every 1 --sample 0";
    let flags = format!("{flags} --recipe torch --lr 1e-2");
    succeed(folder.path(), &format!("{flags} --steps 6 --save whole.bpk"));
    succeed(folder.path(), &format!("{flags} --steps 2 --save part.bpk"));
    let resumed = "--resume part.bpk --steps 6 --eval-every 1 --sample 0 --save rest.bpk";
    succeed(folder.path(), resumed);
    let [whole, rest] = ["whole.bpk", "rest.bpk"].map(|name| curve(&folder.path().join(name)));
    assert_eq!(whole, rest);
}

#[test]
fn tokens_without_a_header_are_those_of_shards() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    let counts = [("train", 1600, 1), ("val", 1200, 3)];
    for folder in ["shards", "nanogpt"] {
        fs::create_dir(path(folder)).unwrap();
    }
    for (name, count, seed) in counts {
        let tokens = tokens(count, seed);
        shard(&path(&format!("shards/{name}.bin")), [MAGIC, 1, count as i32], &tokens);
        let alone: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        fs::write(path(&format!("nanogpt/{name}.bin")), alone).unwrap();
    }
    // nanoGPT's folders have more files.
    fs::write(path("nanogpt/prepare.py"), "import os").unwrap();
    fs::write(path("nanogpt/meta.pkl"), [0; 9]).unwrap();
    let flags = "--vocabulary 97 --context 32 --batch 8 --eval-every 1 --sample 4";
    let flags = format!("{flags} --recipe torch --lr 1e-2");
    let run = |more: &str| succeed_with_output(folder.path(), &format!("{flags} {more}")).1;
    let nanogpt = "--data nanogpt --data-format nanogpt";
    run("--data shards --steps 5 --save shards.bpk");
    let first = run(&format!("{nanogpt} --steps 3 --save part.bpk"));
    assert!(first.contains("shards: 2 files, 2800 tokens"), "{first}");
    let resumed = "--resume part.bpk --steps 5 --eval-every 1 --sample 0 --save rest.bpk";
    let (_, resumed) = succeed_with_output(folder.path(), resumed);
    // Three batches of 256 tokens lie behind.
    let expected = format!("at byte {} of", 2 * 3 * 256);
    assert!(resumed.contains(&expected) && resumed.contains("train.bin"), "{resumed}");
    run(&format!("{nanogpt} --steps 5 --ranks 2 --save ranks.bpk"));
    let curves =
        ["shards.bpk", "rest.bpk", "ranks.bpk"].map(|name| curve(&folder.path().join(name)));
    let [shards, rest, ranks] = curves;
    assert_eq!((shards.len(), &shards), (6, &rest));
    for ((_, one), (_, two)) in shards.iter().zip(&ranks) {
        let [one, two] = [one, two].map(|loss| loss.expect("a number"));
        assert!((one - two).abs() < 1e-3 * one, "{shards:?}, {ranks:?}");
    }
    // The checkpoint has the format.
    rejected(
        folder.path(),
        "--resume part.bpk --steps 5 --data shards --data-format modded-nanogpt",
        "--data-format modded-nanogpt (saved: nanogpt)",
    );
}

#[test]
fn shards_that_can_not_be_trained_on_are_rejected() {
    let folder = folder();
    let write = |name: &str, header, count| {
        shard(&folder.path().join(name), header, &tokens(count, 1));
    };
    write("magic.bin", [1, 1, 4000], 4000);
    write("version.bin", [MAGIC, 2, 4000], 4000);
    write("count.bin", [MAGIC, 1, 4001], 4000);
    write("negative.bin", [MAGIC, 1, -1], 4000);
    write("few.bin", [MAGIC, 1, 1000], 1000);
    write("good.bin", [MAGIC, 1, 60_000], 60_000);
    fs::write(folder.path().join("short.bin"), [0; 1000]).unwrap();
    fs::write(folder.path().join("odd.bin"), [0; 4001]).unwrap();
    let nanogpt = "--data-format nanogpt --vocabulary 97";
    let headered = format!("--data good.bin {nanogpt}");
    let odd = format!("--data odd.bin {nanogpt}");
    let text = format!("--data text.rs {nanogpt}");
    let small = "--batch 2 --context 32 --steps 1 --sample 0";
    for (arguments, expected) in [
        (
            "--data magic.bin",
            "--data magic.bin: it does not have the header of a shard: expected 20240520 and \
             version 1, got 1 and 1",
        ),
        ("--data version.bin", "got 20240520 and 2"),
        ("--data count.bin", "its header does not fit it: expected 4000 tokens in 9024 bytes"),
        ("--data negative.bin", "got -1"),
        ("--data short.bin", "it is too short for a shard: expected a header of 1024 bytes"),
        (
            "--data few.bin",
            "the shards have fewer tokens for training than a batch: expected 2049, got 950",
        ),
        (
            "--data few.bin --batch 2 --context 32",
            "for validation than a batch: expected 65, got 50",
        ),
        ("--data good.bin --bpe 300", "--bpe is for text, and shards have tokens"),
        ("--data short.bin", "give --data-format nanogpt if it has tokens alone"),
        ("--data magic.bin", "give --data-format nanogpt if it has tokens alone"),
        (
            &headered,
            "--data good.bin: it has the header of a shard: expected tokens alone, got 20240520 \
             and version 1; leave --data-format nanogpt out",
        ),
        (
            &odd,
            "--data odd.bin: its last token is cut: expected an even number of bytes, of 16-bit \
             tokens, got 4001; write it anew with nanoGPT's prepare.py",
        ),
        (
            &text,
            "--data has no tokens: expected files .bin, got none; write them with nanoGPT's \
             prepare.py",
        ),
        ("--data-format nanogpt", "--data <PATH>"),
    ] {
        rejected(folder.path(), arguments, expected);
    }
    let other = format!("--data good.bin --vocabulary 50 {small}");
    rejected(folder.path(), &other, "is not in the vocabulary: expected less than 50, got");
}
