//! A thin engine over Fabric: a real decoder-only transformer with a paged KV cache.

#![forbid(unsafe_code)]

pub mod generate;
pub mod gguf;
pub mod kv;
pub mod model;
pub mod resolve;
pub mod sampling;
pub mod serve;
pub mod tokenizer;
