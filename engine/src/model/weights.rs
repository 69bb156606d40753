//! Where a model's tensors come from.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::BufReader;

use anyhow::{Context, Result, ensure};
use candle_core::quantized::gguf_file::Content;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};

use crate::gguf::GgufError;
use crate::sampling::SplitMix64;

/// A source of named tensors.
pub(crate) trait Weights {
    /// Says whether there is such a tensor.
    fn has(&self, name: &str) -> bool;

    /// The tensor of that name, which must have that shape.
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<QTensor>;

    /// Checks, after the last tensor, that none is left over.
    fn finish(self) -> Result<()>;
}

/// The tensors of a GGUF file.
pub(crate) struct GgufWeights<'a> {
    content: &'a Content,
    file: BufReader<File>,
    used: BTreeSet<String>,
}

impl<'a> GgufWeights<'a> {
    pub(crate) fn new(content: &'a Content, file: BufReader<File>) -> Self {
        Self {
            content,
            file,
            used: BTreeSet::new(),
        }
    }
}

impl Weights for GgufWeights<'_> {
    fn has(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<QTensor> {
        let Some(info) = self.content.tensor_infos.get(name) else {
            return Err(GgufError::TensorMissing {
                tensor: name.to_owned(),
            }
            .into());
        };
        let got = info.shape.dims().to_vec();
        if got != shape {
            let (tensor, want) = (name.to_owned(), shape.to_vec());
            return Err(GgufError::TensorShape { tensor, got, want }.into());
        }
        self.used.insert(name.to_owned());
        self.content
            .tensor(&mut self.file, name, &Device::Cpu)
            .with_context(|| format!("gguf: read tensor `{name}`"))
    }

    fn finish(self) -> Result<()> {
        let mut names: Vec<&String> = self.content.tensor_infos.keys().collect();
        names.sort_unstable();
        match names.into_iter().find(|name| !self.used.contains(*name)) {
            Some(name) => Err(GgufError::TensorUnknown {
                tensor: name.clone(),
            }
            .into()),
            None => Ok(()),
        }
    }
}

/// Tensors made from a seed and their names.
pub(crate) struct RandomWeights {
    seed: u64,
}

impl RandomWeights {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed }
    }

    fn generator(&self, name: &str) -> SplitMix64 {
        // FNV-1a, so that a tensor depends on its name but not on the order of loading.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        SplitMix64::new(self.seed ^ hash)
    }
}

impl Weights for RandomWeights {
    fn has(&self, _name: &str) -> bool {
        true
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<QTensor> {
        if let [length] = shape {
            let ones = Tensor::from_vec(vec![1_f32; *length], *length, &Device::Cpu)?;
            return Ok(QTensor::quantize(&ones, GgmlDType::F32)?);
        }
        ensure!(shape.len() == 2, "tensor `{name}` has shape {shape:?}");
        let mut random = self.generator(name);
        // Uniform with variance 1 / inputs keeps the activations' size from layer to layer.
        let bound = (3.0 / shape[1] as f32).sqrt();
        let values = (0..shape[0] * shape[1]).map(|_| (random.unit() * 2.0 - 1.0) * bound);
        let values = Tensor::from_vec(values.collect::<Vec<f32>>(), shape, &Device::Cpu)?;
        Ok(QTensor::quantize(&values, GgmlDType::Q8_0)?)
    }

    fn finish(self) -> Result<()> {
        Ok(())
    }
}
