//! Choosing the next token from logits: greedy, or seeded temperature and top-p.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// A small deterministic random number generator (`SplitMix64`); not for secrets.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// The generator of `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0, included, to 1, excluded.
    pub fn unit(&mut self) -> f32 {
        let high = (self.bits() >> 40) as f32;
        high / 16_777_216.0
    }
}

/// How to choose.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct SamplingParams {
    /// What the logits are divided by; 0 means greedy.
    pub temperature: f32,
    /// The most likely tokens whose probabilities reach this sum are kept; 1 keeps all.
    pub top_p: f32,
    /// The seed of the choices.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            seed: 0,
        }
    }
}

/// Chooses tokens for one request.
///
/// It can be serialised between two choices and go on elsewhere, as when prefill chose the first
/// token and decode chooses the rest.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Sampler {
    params: SamplingParams,
    random: SplitMix64,
}

impl Sampler {
    /// A sampler at its start.
    ///
    /// # Errors
    ///
    /// If a parameter is out of range.
    pub fn new(params: SamplingParams) -> Result<Self> {
        let SamplingParams {
            temperature,
            top_p,
            seed,
        } = params;
        ensure!(
            (0.0..=100.0).contains(&temperature),
            "temperature is {temperature}, want 0 to 100"
        );
        ensure!(
            top_p > 0.0 && top_p <= 1.0,
            "top_p is {top_p}, want above 0, up to 1"
        );
        Ok(Self {
            params,
            random: SplitMix64::new(seed),
        })
    }

    /// Chooses the next token.
    ///
    /// # Errors
    ///
    /// If a logit is not a number: the model's memory or arithmetic is broken, and any token chosen
    /// would hide that.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        ensure!(!logits.is_empty(), "no logits");
        if let Some(index) = logits.iter().position(|logit| logit.is_nan()) {
            anyhow::bail!("the logit of token {index} is not a number");
        }
        let index = if self.params.temperature == 0.0 {
            greedy(logits)
        } else {
            self.draw(logits)
        };
        Ok(u32::try_from(index)?)
    }

    fn draw(&mut self, logits: &[f32]) -> usize {
        let max = logits
            .iter()
            .fold(f32::NEG_INFINITY, |max, logit| max.max(*logit));
        let weight = |logit: f32| crate::model::math::exp((logit - max) / self.params.temperature);
        let mut weights: Vec<(usize, f32)> = logits
            .iter()
            .map(|logit| weight(*logit))
            .enumerate()
            .collect();
        // Equal weights keep their order, so that the choice depends on the logits alone.
        weights.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        let total: f32 = weights.iter().map(|(_, weight)| weight).sum();
        let mut kept = 0.0;
        let mut count = 0;
        while count < weights.len() && (count == 0 || kept < total * self.params.top_p) {
            kept += weights[count].1;
            count += 1;
        }
        let mut left = self.random.unit() * kept;
        for (index, weight) in &weights[..count] {
            left -= weight;
            if left < 0.0 {
                return *index;
            }
        }
        // Rounding left a crumb: the most likely token is as good as any.
        weights[0].0
    }
}

/// The index of the greatest logit; the first of equals.
fn greedy(logits: &[f32]) -> usize {
    let mut best = 0;
    for (index, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = index;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(params: SamplingParams, logits: &[f32], count: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(params).unwrap();
        (0..count)
            .map(|_| sampler.sample(logits).unwrap())
            .collect()
    }

    #[test]
    fn greedy_takes_the_first_of_equal_maxima() {
        assert_eq!(
            choices(SamplingParams::default(), &[0.5, 2.0, -1.0, 2.0], 2),
            [1, 1]
        );
    }

    #[test]
    fn a_seed_fixes_the_choices_and_another_changes_them() {
        let logits: Vec<f32> = (0..50_u8).map(|i| f32::from(i % 7)).collect();
        let params = |seed| SamplingParams {
            temperature: 1.0,
            top_p: 0.95,
            seed,
        };
        assert_eq!(
            choices(params(7), &logits, 64),
            choices(params(7), &logits, 64)
        );
        assert_ne!(
            choices(params(7), &logits, 64),
            choices(params(8), &logits, 64)
        );
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let params = SamplingParams {
            temperature: 2.0,
            top_p: 1.0,
            seed: 1,
        };
        // At temperature 2 these are weights 1 and 3.
        let drawn = choices(params, &[0.0, 2.0 * 3_f32.ln()], 4000);
        let second = drawn.iter().filter(|token| **token == 1).count();
        assert!(
            (2900..3100).contains(&second),
            "{second} of 4000, want about 3000"
        );
    }

    #[test]
    fn top_p_never_chooses_the_tail() {
        let params = SamplingParams {
            temperature: 1.0,
            top_p: 0.6,
            seed: 3,
        };
        // Probabilities 0.5, 0.3, 0.2: the first two reach 0.6.
        let logits = [0.2_f32.ln(), 0.5_f32.ln(), 0.3_f32.ln()];
        let drawn = choices(params, &logits, 500);
        assert!(
            drawn.iter().all(|token| *token != 0),
            "token 0 is in the tail"
        );
        assert!(drawn.contains(&2), "the second token is in the nucleus");
    }

    #[test]
    fn a_sampler_goes_on_elsewhere() {
        let params = SamplingParams {
            temperature: 1.0,
            top_p: 1.0,
            seed: 9,
        };
        let logits = [0.1; 40];
        let mut here = Sampler::new(params).unwrap();
        here.sample(&logits).unwrap();
        let bytes = serde_json::to_vec(&here).unwrap();
        let mut there: Sampler = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(
            here.sample(&logits).unwrap(),
            there.sample(&logits).unwrap()
        );
    }

    #[test]
    fn bad_input_is_an_error() {
        let params = SamplingParams {
            temperature: -1.0,
            ..SamplingParams::default()
        };
        assert!(Sampler::new(params).is_err());
        let params = SamplingParams {
            top_p: f32::NAN,
            ..SamplingParams::default()
        };
        assert!(Sampler::new(params).is_err());
        let mut sampler = Sampler::new(SamplingParams::default()).unwrap();
        let error = sampler.sample(&[1.0, f32::NAN]).unwrap_err();
        assert_eq!(error.to_string(), "the logit of token 1 is not a number");
    }
}
