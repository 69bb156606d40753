//! What can go wrong with a request, and the HTTP status that says so. Never 200.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use fabric_proto::outcome::{Outcome, Rejection};
use serde::{Deserialize, Serialize};

/// Why a request was not answered.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum ServeError {
    /// The request itself is at fault; the text names the value and the bound.
    #[error("{0}")]
    BadRequest(String),
    /// No room just now: worth trying again.
    #[error("{0}")]
    Busy(String),
    /// The pages did not arrive, or not as they were sent.
    #[error("{0}")]
    Transfer(String),
    /// The engine is at fault.
    #[error("{0}")]
    Internal(String),
}

/// An error as it stands in a response's body.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct ErrorBody {
    /// The error.
    pub(super) error: ErrorDetail,
}

/// The inside of an [`ErrorBody`], in OpenAI's shape.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct ErrorDetail {
    /// What happened, with the numbers that were compared.
    pub(super) message: String,
    /// The kind of error.
    #[serde(rename = "type")]
    pub(super) kind: String,
    /// The HTTP status.
    pub(super) code: u16,
}

impl ServeError {
    /// The error of a rejected lease or transfer.
    #[must_use]
    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "an unknown reason is nobody's fault here"
    )]
    pub(super) fn rejected(what: &str, reason: Rejection) -> Self {
        let text = format!("{what}: {reason}");
        match reason {
            Rejection::ExceedsContext { .. }
            | Rejection::ExceedsPool { .. }
            | Rejection::ExceedsLimit { .. }
            | Rejection::Malformed { .. }
            | Rejection::TenantNotAllowed => Self::BadRequest(text),
            Rejection::Busy { .. } | Rejection::ShuttingDown => Self::Busy(text),
            // What a client can do nothing about, later reasons included.
            _ => Self::Transfer(text),
        }
    }

    /// The error of a transfer that ended otherwise than delivered.
    // S3: a rejected, aborted or failed transfer is an error, and never a response.
    #[must_use]
    pub(super) fn outcome(what: &str, outcome: Outcome) -> Self {
        match outcome {
            Outcome::Rejected(reason) => Self::rejected(what, reason),
            Outcome::Delivered | Outcome::Aborted(_) | Outcome::Failed(_) => {
                Self::Transfer(format!("{what}: {outcome}"))
            }
        }
    }

    /// An error that another engine answered with.
    #[must_use]
    pub(super) fn relayed(status: u16, message: String) -> Self {
        match status {
            400 => Self::BadRequest(message),
            503 => Self::Busy(message),
            _ => Self::Transfer(message),
        }
    }

    /// The status that says so.
    #[must_use]
    pub(super) const fn status(&self) -> StatusCode {
        match self {
            Self::BadRequest(_) => StatusCode::BAD_REQUEST,
            Self::Busy(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Transfer(_) => StatusCode::BAD_GATEWAY,
            Self::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    const fn kind(&self) -> &'static str {
        match self {
            Self::BadRequest(_) => "invalid_request_error",
            Self::Busy(_) => "overloaded_error",
            Self::Transfer(_) => "transfer_error",
            Self::Internal(_) => "internal_error",
        }
    }
}

impl IntoResponse for ServeError {
    fn into_response(self) -> Response {
        let (status, kind) = (self.status(), self.kind().to_owned());
        let error = ErrorDetail {
            message: self.to_string(),
            kind,
            code: status.as_u16(),
        };
        let mut response = (status, Json(ErrorBody { error })).into_response();
        if matches!(self, Self::Busy(_)) {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use fabric_proto::outcome::{Abort, Failure};

    use super::*;

    #[test]
    fn no_outcome_but_delivered_is_answered_with_200() {
        let too_long = Rejection::ExceedsContext {
            tokens: 9,
            context: 8,
        };
        let cases = [
            (Outcome::Rejected(too_long), 400),
            (
                Outcome::Rejected(Rejection::Busy {
                    slots_needed: 2,
                    slots_free: 1,
                }),
                503,
            ),
            (Outcome::Rejected(Rejection::OfferUsed), 502),
            (Outcome::Aborted(Abort::Source), 502),
            (Outcome::Failed(Failure::LinkLost), 502),
        ];
        for (outcome, status) in cases {
            assert_eq!(
                ServeError::outcome("decode", outcome).status(),
                status,
                "{outcome}"
            );
        }
        let error = ServeError::rejected("decode pool", too_long);
        assert_eq!(
            error.to_string(),
            "decode pool: the request has 9 tokens, and the context has 8"
        );
    }
}
