//! The default model, as published. It must be in the cache or reachable: a test that cannot have
//! it fails and says which places were tried.

#![forbid(unsafe_code)]

use std::sync::OnceLock;

use fabric_engine::generate::{Request, generate, prefill};
use fabric_engine::kv::HostKv;
use fabric_engine::resolve::{DEFAULT_MODEL, Loaded, cache_folder, load, resolve};
use fabric_engine::sampling::SamplingParams;
use fabric_engine::tokenizer::{Message, Role};
use serde::Deserialize;

fn loaded() -> &'static Loaded {
    static LOADED: OnceLock<Loaded> = OnceLock::new();
    LOADED.get_or_init(|| {
        let cache = cache_folder().expect("a cache folder");
        let source = resolve(DEFAULT_MODEL, &cache).unwrap_or_else(|error| {
            panic!("this test needs the default model: run `fabric-engine fetch`: {error:#}")
        });
        load(&source).expect("the published model loads")
    })
}

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
    chat: Chat,
}

#[derive(Deserialize)]
struct Case {
    text: String,
    /// With the names of control tokens meaning those tokens.
    ids: Vec<u32>,
    /// With everything taken as plain text.
    text_ids: Vec<u32>,
}

#[derive(Deserialize)]
struct Chat {
    user: String,
    ids: Vec<u32>,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("../testdata/tokens.json")).expect("the golden file parses")
}

#[test]
fn tokens_are_those_of_the_reference() {
    let tokenizer = &loaded().tokenizer;
    for Case {
        text,
        ids,
        text_ids,
    } in golden().cases
    {
        assert_eq!(
            tokenizer.encode_with_specials(&text).unwrap(),
            ids,
            "{text:?}"
        );
        assert_eq!(
            tokenizer.encode(&text).unwrap(),
            text_ids,
            "{text:?} as plain text"
        );
        assert_eq!(tokenizer.decode(&ids), text, "and back");
    }
}

#[test]
fn chat_is_that_of_the_template() {
    let Chat { user, ids } = golden().chat;
    let messages = [Message {
        role: Role::User,
        content: user,
    }];
    assert_eq!(loaded().tokenizer.encode_chat(&messages).unwrap(), ids);
}

#[test]
fn streaming_gives_the_text_piece_by_piece() {
    let tokenizer = &loaded().tokenizer;
    for Case { text, text_ids, .. } in golden().cases {
        let mut stream = tokenizer.stream();
        let mut streamed: String = text_ids.iter().filter_map(|id| stream.push(*id)).collect();
        streamed.extend(stream.finish());
        assert_eq!(streamed, text);
    }
}

fn complete(prompt: Vec<u32>, max_tokens: usize) -> String {
    let shape = loaded().model.kv_shape(16);
    let mut cache = HostKv::new(shape, shape.slots_for(prompt.len() + max_tokens));
    let request = Request {
        prompt,
        max_tokens,
        sampling: SamplingParams::default(),
    };
    generate(loaded(), &request, &mut cache, &mut |_| Ok(()))
        .expect("it generates")
        .text
}

#[test]
fn the_capital_of_france_is_paris() {
    let prompt = loaded()
        .tokenizer
        .encode("The capital of France is")
        .unwrap();
    let text = complete(prompt, 12);
    assert!(text.contains(" Paris"), "got {text:?}");
}

#[derive(Deserialize)]
struct Reference {
    cases: Vec<Forward>,
}

#[derive(Deserialize)]
struct Forward {
    prompt: Vec<u32>,
    /// Some tokens and their logits after the prompt.
    logits: Vec<(usize, f32)>,
    /// The tokens that follow, up to one that ends an answer.
    greedy: Vec<u32>,
}

#[test]
fn logits_are_those_of_an_independent_implementation() {
    let Loaded { model, tokenizer } = loaded();
    let text = include_str!("../testdata/logits.json");
    let reference: Reference = serde_json::from_str(text).expect("the golden file parses");
    for Forward {
        prompt,
        logits,
        greedy,
    } in reference.cases
    {
        let mut cache = HostKv::new(model.kv_shape(16), 8);
        let got = prefill(model, &prompt, 0, &mut cache, &mut |_, _| Ok(())).unwrap();
        for (token, want) in logits {
            // The reference's K and V are f32, the cache's are f16.
            assert!(
                (got[token] - want).abs() < 0.05,
                "token {token}: {} {want}",
                got[token]
            );
        }
        let want: Vec<u32> = greedy
            .iter()
            .copied()
            .filter(|id| !tokenizer.is_end(*id))
            .collect();
        assert_eq!(complete(prompt, greedy.len()), tokenizer.decode(&want));
    }
}
