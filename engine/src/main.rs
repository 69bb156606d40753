//! The engine's command line.

#![forbid(unsafe_code)]

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use fabric_engine::generate::{Request, generate};
use fabric_engine::kv::HostKv;
use fabric_engine::resolve::{DEFAULT_MODEL, ModelSource, cache_folder, load, resolve};
use fabric_engine::sampling::SamplingParams;
use fabric_engine::serve::{ServeArgs, serve};
use fabric_engine::tokenizer::{Message, Role, Tokenizer};

/// The slot size of a cache that nobody else sees.
const TOKENS_PER_SLOT: usize = 16;

/// An LLM engine over Fabric.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Resolve a model, downloading it if need be, and print where it is.
    Fetch(ModelArgs),
    /// Generate text on this node alone.
    Generate(GenerateArgs),
    /// Serve completions over HTTP, as one side of a disaggregated pair or alone.
    Serve(ServeArgs),
}

#[derive(Debug, Args)]
struct ModelArgs {
    /// A path to a .gguf file, random:SEED or smollm2.
    #[arg(long, default_value = DEFAULT_MODEL)]
    model: String,
}

#[derive(Debug, Args)]
struct GenerateArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The prompt.
    #[arg(
        long,
        required_unless_present = "prompt_file",
        conflicts_with = "prompt_file"
    )]
    prompt: Option<String>,
    /// A file that holds the prompt.
    #[arg(long)]
    prompt_file: Option<PathBuf>,
    /// Take the prompt as a user's chat message.
    #[arg(long)]
    chat: bool,
    /// The most tokens to generate.
    #[arg(long, default_value_t = 128)]
    max_tokens: usize,
    /// What logits are divided by; 0 always takes the likeliest token.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Keep the likeliest tokens up to this probability.
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// The seed of random choices.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Threads to compute with; one per core if not given.
    #[arg(long)]
    threads: Option<usize>,
    /// Print one JSON object at the end instead of text as it comes.
    #[arg(long)]
    json: bool,
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Action::Fetch(args) => run_fetch(&args),
        Action::Generate(args) => run_generate(&args),
        Action::Serve(args) => run_serve(args),
    }
}

fn run_serve(args: ServeArgs) -> Result<()> {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    tokio::runtime::Runtime::new()?.block_on(serve(args))
}

fn run_fetch(args: &ModelArgs) -> Result<()> {
    match resolve(&args.model, &cache_folder()?)? {
        ModelSource::File(path) => println!("{}", path.display()),
        ModelSource::Random { seed } => println!("random:{seed}"),
    }
    Ok(())
}

fn run_generate(args: &GenerateArgs) -> Result<()> {
    if let Some(threads) = args.threads {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build_global()?;
    }
    let loaded = load(&resolve(&args.model.model, &cache_folder()?)?)?;
    let prompt = encode_prompt(args, &loaded.tokenizer)?;
    let prompt_tokens = prompt.len();
    let &GenerateArgs {
        max_tokens,
        temperature,
        top_p,
        seed,
        ..
    } = args;
    let tokens = prompt_tokens
        .saturating_add(max_tokens)
        .min(loaded.model.config().context);
    let shape = loaded.model.kv_shape(TOKENS_PER_SLOT);
    let mut cache = HostKv::new(shape, shape.slots_for(tokens));
    let sampling = SamplingParams {
        temperature,
        top_p,
        seed,
    };
    let request = Request {
        prompt,
        max_tokens,
        sampling,
    };
    let mut out = std::io::stdout();
    let generated = generate(&loaded, &request, &mut cache, &mut |text| {
        if !args.json {
            out.write_all(text.as_bytes())?;
            out.flush()?;
        }
        Ok(())
    })?;
    let speed = |count: usize, seconds: f64| count as f64 / seconds.max(1e-9);
    let prefill_speed = speed(prompt_tokens, generated.prefill.as_secs_f64());
    let decode_speed = speed(generated.decode_steps, generated.decode.as_secs_f64());
    if args.json {
        let report = serde_json::json!({
            "prompt_tokens": prompt_tokens,
            "tokens": generated.tokens,
            "text": generated.text,
            "stop": generated.stop,
            "prefill_tokens_per_second": prefill_speed,
            "decode_tokens_per_second": decode_speed,
        });
        println!("{report}");
    } else {
        println!();
    }
    eprintln!(
        "prefill: {prompt_tokens} tokens, {prefill_speed:.1} tokens/s; decode: {} tokens, \
         {decode_speed:.1} tokens/s",
        generated.tokens.len()
    );
    Ok(())
}

fn encode_prompt(args: &GenerateArgs, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let text = match (&args.prompt, &args.prompt_file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) => std::fs::read_to_string(path)
            .with_context(|| format!("read prompt {}", path.display()))?,
        (None, None) => String::new(),
    };
    if args.chat {
        return tokenizer.encode_chat(&[Message {
            role: Role::User,
            content: text,
        }]);
    }
    tokenizer.encode_with_specials(&text)
}
