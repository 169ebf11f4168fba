// The calls between steps: weights, counts, checkpoints.
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/join.h"
#include "client/session_impl.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"

namespace ballast::client {

absl::Status SessionImpl::UploadWeights(
    const std::function<void(int chunk, absl::Span<float> out)>& fill) {
  BALLAST_RETURN_IF_ERROR(CheckBetweenSteps("UploadWeights"));
  const absl::Span<const int> chunks = layout_.chunks_of_rank(options_.rank);
  const absl::StatusOr<v1::UploadWeightsResponse> response =
      transport_->UploadWeights(OpenMessage(), chunks, [&](int chunk) {
        std::vector<float> values(layout_.chunks()[chunk].elements);
        fill(chunk, absl::MakeSpan(values));
        return values;
      });
  if (!response.ok()) {
    return Annotate(response.status(), absl::StrCat(Context(), ": upload of first weights"));
  }
  if (response->chunks() != static_cast<int64_t>(chunks.size())) {
    return absl::InternalError(absl::StrCat(Context(), ": the service took ", response->chunks(),
                                            " of ", chunks.size(), " chunks of first weights"));
  }
  return absl::OkStatus();
}

absl::Status SessionImpl::ReadWeights() {
  BALLAST_RETURN_IF_ERROR(CheckBetweenSteps("ReadWeights"));
  const std::string context = absl::StrCat(Context(), ": reading weights");
  if (absl::Status status = AwaitFirstWeights(*transport_, clock_, options_); !status.ok()) {
    return Annotate(status, context);
  }
  awaiting_weights_ = false;
  // An empty list would mean all chunks.
  if (layout_.chunks_of_rank(options_.rank).empty()) return absl::OkStatus();
  WeightSink sink(layout_, options_.job.groups, options_.rank, options_.weights,
                  options_.on_weights);
  sink.Begin();
  Backoff backoff(clock_, clock_.Now() + options_.reconnect_timeout);
  std::optional<uint64_t> step;
  for (;;) {
    const absl::Status read = FetchWeights(sink, step);
    if (read.ok()) break;
    BALLAST_RETURN_IF_ERROR(progress_.failure());
    if (!absl::IsUnavailable(read) || !backoff.Wait()) return Annotate(read, context);
  }
  committed_step_ = *step;
  return absl::OkStatus();
}

absl::Status SessionImpl::FetchWeights(WeightSink& sink, std::optional<uint64_t>& step) {
  v1::ReadWeightsRequest request;
  request.set_name(proto::JobName(options_.job.name));
  request.set_uid(attached_.uid());
  if (step.has_value()) request.set_step(*step);
  for (int chunk : sink.ListMissing()) request.add_chunks(static_cast<uint32_t>(chunk));
  BALLAST_ASSIGN_OR_RETURN(
      step,
      transport_->ReadWeights(request, [&](const v1::WeightHeader& header, PayloadPieces payload) {
        // Should the call fail now, the rest must be of the same step.
        step = header.step();
        return sink.Place(header, payload);
      }));
  if (sink.missing_chunks() == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(sink.missing_chunks(), " chunks did not come"));
}

absl::StatusOr<JobCounts> SessionImpl::ReadCounts() {
  v1::GetJobRequest request;
  request.set_name(proto::JobName(options_.job.name));
  BALLAST_ASSIGN_OR_RETURN(const v1::Job job, transport_->GetJob(request));
  return JobCounts{.applied_steps = job.applied_steps(),
                   .skipped_steps = job.skipped_steps(),
                   .coverage_complete_steps = job.coverage_complete_steps(),
                   .speculated_chunks = job.speculation().speculated_chunks(),
                   .published_chunks = job.speculation().published_chunks(),
                   .redone_chunks = job.speculation().redone_chunks()};
}

absl::Status SessionImpl::SaveCheckpoint(const std::string& directory) {
  BALLAST_RETURN_IF_ERROR(CheckBetweenSteps("SaveCheckpoint"));
  v1::SaveJobRequest request;
  request.set_name(proto::JobName(options_.job.name));
  request.set_directory(directory);
  return Annotate(transport_->SaveJob(request).status(),
                  absl::StrCat(Context(), ": saving to ", directory));
}

absl::Status SessionImpl::LoadCheckpoint(const std::string& directory) {
  BALLAST_RETURN_IF_ERROR(CheckBetweenSteps("LoadCheckpoint"));
  v1::LoadJobRequest request;
  request.set_name(proto::JobName(options_.job.name));
  request.set_directory(directory);
  const absl::Status loaded = transport_->LoadJob(request).status();
  if (!loaded.ok()) return Annotate(loaded, absl::StrCat(Context(), ": loading ", directory));
  // The generation has risen: no rank's stream is good any more, this one's included.
  keeper_->Stop();
  OnEnded(absl::AbortedError("a checkpoint was loaded; open the session again"));
  return absl::OkStatus();
}

}  // namespace ballast::client
