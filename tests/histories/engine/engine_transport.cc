#include "tests/histories/engine/engine_transport.h"

#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "server/jobs/job_message.h"
#include "server/train/weight_message.h"
#include "tests/histories/engine/engine_stream.h"

namespace ballast::histories {

template <typename Call>
auto EngineTransport::WithJob(const std::string& name, Call&& call)
    -> decltype(call(std::declval<Host::Visit&>(), std::declval<const std::shared_ptr<Job>&>())) {
  if (cancelled_) return absl::CancelledError("the transport's calls were cancelled");
  BALLAST_ASSIGN_OR_RETURN(const proto::ResourceName parsed, proto::ParseJobName(name));
  const auto visit = host_.Enter();
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, visit->engine().FindJob(parsed.job));
  auto result = call(*visit, job);
  BALLAST_RETURN_IF_ERROR(visit->Heard(result.status()));
  return result;
}

absl::StatusOr<v1::Job> EngineTransport::CreateJob(const v1::CreateJobRequest& request,
                                                   absl::Duration limit) {
  BALLAST_ASSIGN_OR_RETURN(JobSpec spec, proto::FromProto(request.job()));
  const auto visit = host_.Enter();
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job,
                           visit->engine().CreateJob(std::move(spec)));
  return server::ToMessage(visit->engine(), *job, /*with_parameters=*/true);
}

absl::StatusOr<v1::Job> EngineTransport::GetJob(const v1::GetJobRequest& request) {
  return WithJob(
      request.name(),
      [&](Host::Visit& visit, const std::shared_ptr<Job>& job) -> absl::StatusOr<v1::Job> {
        return server::ToMessage(visit.engine(), *job, request.with_parameters());
      });
}

absl::StatusOr<v1::AttachWorkerResponse> EngineTransport::AttachWorker(
    const v1::AttachWorkerRequest& request, absl::Duration limit) {
  AttachRequest attach = {
      .rank = request.rank(), .process_id = request.process_id(), .uid = request.uid()};
  if (request.has_generation()) attach.generation = proto::FromProto(request.generation());
  if (request.has_expected_committed_step()) {
    attach.expected_committed_step = request.expected_committed_step();
  }
  if (request.has_job()) {
    BALLAST_ASSIGN_OR_RETURN(attach.spec, proto::FromProto(request.job()));
  }
  return WithJob(request.name(),
                 [&](Host::Visit& visit,
                     const std::shared_ptr<Job>& job) -> absl::StatusOr<v1::AttachWorkerResponse> {
                   BALLAST_ASSIGN_OR_RETURN(const Attachment attachment,
                                            visit.Await<Attachment>([&](Done<Attachment> done) {
                                              (void)job->Attach(attach, std::move(done));
                                            }));
                   v1::AttachWorkerResponse response;
                   response.set_uid(job->uid());
                   response.set_instance_id(visit.engine().instance_id());
                   *response.mutable_generation() = proto::ToProto(attachment.generation);
                   response.set_committed_step(attachment.committed_step);
                   response.set_awaiting_weights(attachment.awaiting_weights);
                   *response.mutable_job() =
                       server::ToMessage(visit.engine(), *job, /*with_parameters=*/true);
                   return response;
                 });
}

// The players call the engine for these.
absl::StatusOr<v1::UndoStepResponse> EngineTransport::UndoStep(
    const v1::UndoStepRequest& /*request*/) {
  return absl::UnimplementedError("UndoStep");
}
absl::StatusOr<v1::SaveJobResponse> EngineTransport::SaveJob(
    const v1::SaveJobRequest& /*request*/) {
  return absl::UnimplementedError("SaveJob");
}
absl::StatusOr<v1::LoadJobResponse> EngineTransport::LoadJob(
    const v1::LoadJobRequest& /*request*/) {
  return absl::UnimplementedError("LoadJob");
}
// Of O.
absl::StatusOr<v1::UploadWeightsResponse> EngineTransport::UploadWeights(
    const v1::OpenTrain& open, absl::Duration /*limit*/, absl::Span<const int> chunks,
    const std::function<std::vector<std::byte>(int chunk)>& fill) {
  if (open.orthogonal_step() == 0) return absl::UnimplementedError("UploadWeights");
  return WithJob(open.name(),
                 [&](Host::Visit& /*visit*/,
                     const std::shared_ptr<Job>& job) -> absl::StatusOr<v1::UploadWeightsResponse> {
                   const RankHolder holder = {.rank = open.rank(),
                                              .process_id = open.process_id(),
                                              .generation = proto::FromProto(open.generation())};
                   for (const int chunk : chunks) {
                     const std::vector<std::byte> bytes = fill(chunk);
                     const absl::Span<const std::byte> piece(bytes);
                     BALLAST_RETURN_IF_ERROR(job->GiveOrthogonal(
                         holder, open.orthogonal_step(),
                         chunk + job->layout().first_of_rank(open.rank()), {&piece, 1}));
                   }
                   return v1::UploadWeightsResponse();
                 });
}

absl::StatusOr<v1::ReadWeightsResponse> EngineTransport::ReadWeights(
    const v1::ReadWeightsRequest& request, absl::Duration limit,
    const std::function<absl::Status(const v1::WeightHeader& header,
                                     client::PayloadPieces payload)>& place) {
  return WithJob(
      request.name(),
      [&](Host::Visit& /*visit*/,
          const std::shared_ptr<Job>& job) -> absl::StatusOr<v1::ReadWeightsResponse> {
        const JobStatus status = job->Status();
        const uint64_t step = status.committed_step;
        if (request.has_step() && request.step() != step) {
          return absl::FailedPreconditionError("the job stands at another step");
        }
        BALLAST_ASSIGN_OR_RETURN(v1::ReadWeightsResponse first,
                                 server::MakeFirstMessage(*job, step, request.directions()));
        for (const uint32_t chunk : request.chunks()) {
          const int in_job = static_cast<int>(chunk) + job->layout().first_of_rank(request.rank());
          BALLAST_ASSIGN_OR_RETURN(
              const server::OwnedWeights weights,
              request.directions() ? server::ReadDirections(*job, step, in_job)
                                   : server::ReadWeights(*job, status.generation, step, in_job));
          BALLAST_RETURN_IF_ERROR(
              place(server::MakeWeightHeader(step, static_cast<int>(chunk)), {weights.bytes()}));
        }
        return first;
      });
}

std::unique_ptr<client::TrainCall> EngineTransport::OpenTrainCall(client::TrainListener& listener) {
  return std::make_unique<EngineStream>(host_, wires_, rank_, listener);
}

}  // namespace ballast::histories
