//! Typed access to a GGUF file's metadata, with errors that name the key and its value.

use std::ops::RangeInclusive;

use candle_core::quantized::gguf_file::{Content, Value};

/// Why a GGUF file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// Lists that must be equally long are not.
    #[error("gguf: `{key}` has {got} entries, `{other}` has {want}")]
    Length {
        /// The key of the list.
        key: String,
        /// How many entries it has.
        got: usize,
        /// The key of the list that sets the length.
        other: &'static str,
        /// How many entries that one has.
        want: usize,
    },
    /// A key is absent.
    #[error("gguf: key `{key}` is missing")]
    Missing {
        /// The key.
        key: String,
    },
    /// A number is outside what this engine accepts.
    #[error("gguf: `{key}` is {got}, want {min} to {max}")]
    OutOfRange {
        /// The key.
        key: String,
        /// Its value.
        got: i128,
        /// The least accepted value.
        min: i128,
        /// The greatest accepted value.
        max: i128,
    },
    /// A tensor is absent.
    #[error("gguf: tensor `{tensor}` is missing")]
    TensorMissing {
        /// The tensor's name.
        tensor: String,
    },
    /// A tensor does not have the shape that the metadata implies.
    #[error("gguf: tensor `{tensor}` has shape {got:?}, want {want:?}")]
    TensorShape {
        /// The tensor's name.
        tensor: String,
        /// Its shape in the file.
        got: Vec<usize>,
        /// The shape that the metadata implies.
        want: Vec<usize>,
    },
    /// The file holds a tensor that this engine would ignore: its output would be wrong.
    #[error("gguf: tensor `{tensor}` is not part of a plain llama model")]
    TensorUnknown {
        /// The tensor's name.
        tensor: String,
    },
    /// A value is legal GGUF but not supported here.
    #[error("gguf: `{key}` is `{got}`, want {want}")]
    Unsupported {
        /// The key.
        key: String,
        /// Its value.
        got: String,
        /// What is supported.
        want: String,
    },
    /// A value has another type than the key calls for.
    #[error("gguf: `{key}` is {got}, want {want}")]
    WrongType {
        /// The key.
        key: String,
        /// The type found and, where it is short, the value.
        got: String,
        /// The type expected.
        want: &'static str,
    },
}

/// A value for a message: lists and long strings are named by kind and length only.
fn describe(value: &Value) -> String {
    const SHOWN_CHARS_MAX: usize = 60;
    if let Value::Array(list) = value {
        return format!("a list of {}", list.len());
    }
    let text = format!("{value:?}");
    if text.chars().count() > SHOWN_CHARS_MAX {
        return format!(
            "{}…",
            text.chars().take(SHOWN_CHARS_MAX).collect::<String>()
        );
    }
    text
}

fn wrong_type(key: &str, got: &Value, want: &'static str) -> GgufError {
    GgufError::WrongType {
        key: key.to_owned(),
        got: describe(got),
        want,
    }
}

fn integer(value: &Value) -> Option<i128> {
    match value {
        Value::U8(n) => Some((*n).into()),
        Value::I8(n) => Some((*n).into()),
        Value::U16(n) => Some((*n).into()),
        Value::I16(n) => Some((*n).into()),
        Value::U32(n) => Some((*n).into()),
        Value::I32(n) => Some((*n).into()),
        Value::U64(n) => Some((*n).into()),
        Value::I64(n) => Some((*n).into()),
        Value::F32(_) | Value::F64(_) | Value::Bool(_) | Value::String(_) | Value::Array(_) => None,
    }
}

/// The metadata of an opened GGUF file.
#[derive(Clone, Copy, Debug)]
pub struct Metadata<'a>(&'a Content);

impl<'a> Metadata<'a> {
    /// The metadata of `content`.
    #[must_use]
    pub fn new(content: &'a Content) -> Self {
        Self(content)
    }

    /// Says whether the key is present.
    #[must_use]
    pub fn has(&self, key: &str) -> bool {
        self.0.metadata.contains_key(key)
    }

    fn value(&self, key: &str) -> Result<&'a Value, GgufError> {
        self.0.metadata.get(key).ok_or_else(|| GgufError::Missing {
            key: key.to_owned(),
        })
    }

    /// An integer within `range`.
    ///
    /// # Errors
    ///
    /// If the key is absent, is not an integer or is outside the range.
    pub fn number(&self, key: &str, range: RangeInclusive<usize>) -> Result<usize, GgufError> {
        let value = self.value(key)?;
        let got = integer(value).ok_or_else(|| wrong_type(key, value, "an integer"))?;
        usize::try_from(got)
            .ok()
            .filter(|n| range.contains(n))
            .ok_or_else(|| GgufError::OutOfRange {
                key: key.to_owned(),
                got,
                min: *range.start() as i128,
                max: *range.end() as i128,
            })
    }

    /// A floating point number.
    ///
    /// # Errors
    ///
    /// If the key is absent or is not an `f32`.
    pub fn float(&self, key: &str) -> Result<f32, GgufError> {
        let value = self.value(key)?;
        value.to_f32().map_err(|_| wrong_type(key, value, "an f32"))
    }

    /// A string.
    ///
    /// # Errors
    ///
    /// If the key is absent or is not a string.
    pub fn text(&self, key: &str) -> Result<&'a str, GgufError> {
        let value = self.value(key)?;
        value
            .to_string()
            .map(String::as_str)
            .map_err(|_| wrong_type(key, value, "a string"))
    }

    /// Checks that a string has the one value that is supported.
    ///
    /// # Errors
    ///
    /// If the key is absent, is not a string or has another value.
    pub fn expect_text(&self, key: &str, want: &str) -> Result<(), GgufError> {
        let got = self.text(key)?;
        if got == want {
            return Ok(());
        }
        let (got, want) = (got.to_owned(), format!("`{want}`"));
        Err(GgufError::Unsupported {
            key: key.to_owned(),
            got,
            want,
        })
    }

    fn list(&self, key: &str) -> Result<&'a [Value], GgufError> {
        let value = self.value(key)?;
        value
            .to_vec()
            .map(Vec::as_slice)
            .map_err(|_| wrong_type(key, value, "a list"))
    }

    /// A list of strings.
    ///
    /// # Errors
    ///
    /// If the key is absent or an entry is not a string.
    pub fn texts(&self, key: &str) -> Result<Vec<&'a str>, GgufError> {
        let text = |value: &'a Value| {
            value
                .to_string()
                .map(String::as_str)
                .map_err(|_| wrong_type(key, value, "a string"))
        };
        self.list(key)?.iter().map(text).collect()
    }

    /// A list of integers.
    ///
    /// # Errors
    ///
    /// If the key is absent or an entry is not an integer.
    pub fn integers(&self, key: &str) -> Result<Vec<i128>, GgufError> {
        let number =
            |value| integer(value).ok_or_else(|| wrong_type(key, value, "a list of integers"));
        self.list(key)?.iter().map(number).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::HashMap;

    use candle_core::quantized::gguf_file::VersionedMagic;

    use super::*;

    /// A file with these keys and no tensors.
    pub(crate) fn content(metadata: &[(&str, Value)]) -> Content {
        let metadata = metadata
            .iter()
            .map(|(k, v)| ((*k).to_owned(), v.clone()))
            .collect();
        Content {
            magic: VersionedMagic::GgufV3,
            metadata,
            tensor_infos: HashMap::new(),
            tensor_data_offset: 0,
        }
    }

    #[test]
    fn errors_name_key_and_value() {
        let content = content(&[
            ("a.count", Value::I32(-3)),
            ("a.name", Value::String("x".into())),
            ("a.list", Value::Array(vec![Value::Bool(true)])),
        ]);
        let meta = Metadata::new(&content);
        let message = |error: GgufError| error.to_string();
        assert_eq!(
            message(meta.number("a.count", 1..=9).unwrap_err()),
            "gguf: `a.count` is -3, want 1 to 9"
        );
        assert_eq!(
            message(meta.number("a.none", 1..=9).unwrap_err()),
            "gguf: key `a.none` is missing"
        );
        assert_eq!(
            message(meta.number("a.name", 1..=9).unwrap_err()),
            "gguf: `a.name` is String(\"x\"), want an integer"
        );
        assert_eq!(
            message(meta.texts("a.list").unwrap_err()),
            "gguf: `a.list` is Bool(true), want a string"
        );
        assert_eq!(
            message(meta.expect_text("a.name", "llama").unwrap_err()),
            "gguf: `a.name` is `x`, want `llama`"
        );
    }
}
