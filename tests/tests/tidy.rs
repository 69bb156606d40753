//! House rules that clippy cannot check.

#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};

const PARTS: [&str; 6] = [
    ".ci",
    "engine",
    "fabric-client",
    "fabric-daemon",
    "proto",
    "tests",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The files of a folder and of those within, but for build folders.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            if !path.ends_with("target") {
                files(&path, found);
            }
        } else {
            found.push(path);
        }
    }
}

/// All Rust files of some parts, with their text.
fn sources(parts: &[&str]) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for part in parts {
        files(&root().join(part), &mut found);
    }
    found.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    found.sort();
    let read = |path: PathBuf| fs::read_to_string(&path).ok().map(|text| (path, text));
    found.into_iter().filter_map(read).collect()
}

/// Where a line is found that should not be there.
fn offenders(parts: &[&str], bad: impl Fn(&str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for (path, text) in sources(parts) {
        let lines = (1..).zip(text.lines());
        let bad = lines.filter(|(_, line)| bad(line));
        found.extend(bad.map(|(number, line)| format!("{}:{number}: {line}", path.display())));
    }
    found
}

#[test]
fn there_are_sources_to_check() {
    assert!(sources(&PARTS).len() > 50, "the folders were found");
}

#[test]
fn lines_have_at_most_100_columns() {
    let found = offenders(&PARTS, |line| line.chars().count() > 100);
    assert!(found.is_empty(), "too long:\n{}", found.join("\n"));
}

#[test]
fn nothing_is_left_for_later() {
    // In two halves, so that this file is not an offender.
    let words = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("XX", "X"),
    ];
    let found = offenders(&PARTS, |line| words.iter().any(|word| line.contains(word)));
    assert!(found.is_empty(), "left for later:\n{}", found.join("\n"));
}

/// A request that was turned away is "finished" as well: a flag of that name leaked two prompts.
#[test]
fn nothing_asks_whether_it_is_finished() {
    let code = ["engine", "fabric-client", "fabric-daemon", "proto"];
    let flags = [
        concat!("finished", ": bool"),
        concat!("finished", ": AtomicBool"),
    ];
    let found = offenders(&code, |line| flags.iter().any(|flag| line.contains(flag)));
    assert!(found.is_empty(), "say which outcome:\n{}", found.join("\n"));
}

#[test]
fn no_test_is_ignored_without_a_reason() {
    let found = offenders(&PARTS, |line| line.trim() == concat!("#[", "ignore]"));
    assert!(found.is_empty(), "without a reason:\n{}", found.join("\n"));
}

#[test]
fn no_source_names_a_registry() {
    let hosts = [
        concat!("crates", ".io"),
        concat!("index.", "crates"),
        concat!("pypi", ".org"),
    ];
    let found = offenders(&PARTS, |line| hosts.iter().any(|host| line.contains(host)));
    assert!(found.is_empty(), "a registry's host:\n{}", found.join("\n"));
}

#[test]
fn every_invariant_is_tagged_where_it_is_enforced_and_named_by_a_test() {
    let code = sources(&["proto", "fabric-daemon", "fabric-client", "engine"]);
    let all = sources(&PARTS);
    let names = |text: &str, tag: &str| {
        let words = text.split(|letter: char| !letter.is_ascii_alphanumeric());
        words.into_iter().any(|word| word == tag)
    };
    for number in 1..=10 {
        let tag = format!("S{number}");
        let enforced = |text: &str| {
            let comments = text
                .lines()
                .filter_map(|line| line.trim().strip_prefix("//"));
            comments.into_iter().any(|comment| names(comment, &tag))
        };
        assert!(
            code.iter().any(|(_, text)| enforced(text)),
            "{tag}: no line enforces it"
        );
        let tests = all.iter().filter(|(path, text)| {
            let path = path.to_string_lossy();
            path.contains("/tests") || path.contains("testing") || text.contains("mod tests {")
        });
        let mut tests = tests.filter(|(path, _)| !path.ends_with("tidy.rs"));
        assert!(
            tests.any(|(_, text)| names(text, &tag)),
            "{tag}: no test names it"
        );
    }
}

#[test]
fn every_crate_root_forbids_or_denies_unsafe_code() {
    let is_root = |path: &Path| {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or("");
        let parent = path.parent().and_then(|parent| parent.file_name());
        let parent = parent.and_then(|name| name.to_str()).unwrap_or("");
        (parent == "src" && ["lib.rs", "main.rs"].contains(&name)) || parent == "bin"
    };
    let missing: Vec<_> = sources(&PARTS)
        .into_iter()
        .filter(|(path, _)| is_root(path))
        .filter(|(_, text)| {
            !text.contains("#![forbid(unsafe_code)]") && !text.contains("#![deny(unsafe_code)]")
        })
        .map(|(path, _)| path)
        .collect();
    assert!(missing.is_empty(), "unsafe code is allowed in {missing:?}");
}

/// A line of the specification: its first word, and the names in it.
type Line = (String, Vec<String>);

/// The sections of the specification's invariants, by number.
fn specification() -> Vec<(u8, Vec<Line>)> {
    let text = fs::read_to_string(root().join("proto/README.md")).expect("the specification");
    let sections = text.split("\n### S").skip(1);
    let ticked = |line: &str| -> Vec<String> {
        let parts = line.split('`').skip(1).step_by(2);
        parts.map(str::to_owned).collect()
    };
    sections
        .map(|section| {
            let number = section.split(' ').next().and_then(|word| word.parse().ok());
            let section = section.split("\n## ").next().unwrap_or_default();
            let lines = section.lines().filter_map(|line| line.strip_prefix("- "));
            let lines = lines.filter_map(|line| line.split_once(": "));
            let lines = lines.map(|(word, rest)| (word.to_owned(), ticked(rest)));
            (number.expect("a number"), lines.collect())
        })
        .collect()
}

/// Whether some file of a module has an item of this name, and this tag.
fn has_item(sources: &[(PathBuf, String)], module: &str, item: &str, tag: &str) -> bool {
    let of_module = |path: &Path| path.file_stem().is_some_and(|stem| stem == module);
    let kinds = ["fn", "struct", "enum", "trait"];
    let ends = ["(", "<", " ", ":"];
    let heads = kinds.map(|kind| ends.map(|end| format!("{kind} {item}{end}")));
    let heads = heads.as_flattened();
    let named = |text: &str| heads.iter().any(|head| text.contains(head.as_str()));
    sources
        .iter()
        .any(|(path, text)| of_module(path) && named(text) && text.contains(tag))
}

#[test]
fn the_specification_names_what_is_there() {
    let code = sources(&["proto/src", "tests/sim/src"]);
    let tests = sources(&["proto"]);
    let model = fs::read_to_string(root().join("tests/model/src/lib.rs")).expect("the model");
    let sections = specification();
    let numbers: Vec<_> = sections.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, (1..=10).collect::<Vec<_>>(), "one section each");
    for (number, lines) in sections {
        let words: Vec<_> = lines.iter().map(|(word, _)| word.as_str()).collect();
        let want = ["enforced", "asserted", "modelled", "planted", "tests"];
        assert_eq!(words, want, "S{number}");
        let tag = format!("S{number}");
        for (word, names) in &lines {
            assert!(!names.is_empty(), "S{number}, {word}: nothing is named");
            for name in names {
                let there = match (word.as_str(), name.split_once("::")) {
                    // The lines that enforce an invariant carry its tag.
                    ("enforced", Some((module, item))) => has_item(&code, module, item, &tag),
                    (_, Some((module, item))) => has_item(&code, module, item, ""),
                    ("modelled", None) => model.contains(&format!("\"{name}\"")),
                    ("tests", None) => {
                        let head = format!("#[test]\nfn {name}()");
                        let indented = format!("#[test]\n    fn {name}()");
                        let has = |text: &str| text.contains(&head) || text.contains(&indented);
                        tests.iter().any(|(_, text)| has(text))
                    }
                    ("planted", None) => continue,
                    _ => false,
                };
                assert!(there, "S{number}, {word}: there is no {name}");
            }
        }
    }
}

/// Each planted bug stands under its invariant, and each invariant has at least two.
#[test]
fn the_specification_names_every_planted_bug() {
    let text = fs::read_to_string(root().join("proto/src/planted.rs")).expect("planted bugs");
    let mut planted = Vec::new();
    let mut lines = text.lines().map(str::trim);
    while let Some(line) = lines.next() {
        if let Some(doc) = line.strip_prefix("/// S") {
            let number = doc.split(':').next().and_then(|number| number.parse().ok());
            let name = lines.next().and_then(|name| name.strip_suffix(','));
            let entry: (u8, &str) = (number.expect("a number"), name.expect("a name"));
            planted.push((entry.0, entry.1.to_owned()));
        }
    }
    let mut named = Vec::new();
    for (number, lines) in specification() {
        let of = lines.into_iter().find(|(word, _)| word == "planted");
        let (_, names) = of.expect("each section has them");
        assert!(names.len() >= 2, "S{number} has {}", names.len());
        named.extend(names.into_iter().map(|name| (number, name)));
    }
    planted.sort();
    named.sort();
    assert_eq!(planted, named);
}
