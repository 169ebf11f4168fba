#include "tests/histories/engine/engine_transport.h"

#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "server/jobs/job_message.h"
#include "server/train/weight_message.h"
#include "tests/histories/engine/engine_stream.h"

namespace ballast::histories {

absl::StatusOr<std::shared_ptr<Job>> EngineTransport::Find(const std::string& name) const {
  if (cancelled_) return absl::CancelledError("the transport's calls were cancelled");
  BALLAST_ASSIGN_OR_RETURN(const proto::ResourceName parsed, proto::ParseJobName(name));
  return engine_.FindJob(parsed.job);
}

absl::StatusOr<v1::Job> EngineTransport::CreateJob(const v1::CreateJobRequest& request,
                                                   absl::Duration limit) {
  BALLAST_ASSIGN_OR_RETURN(JobSpec spec, proto::FromProto(request.job()));
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, engine_.CreateJob(std::move(spec)));
  return server::ToMessage(engine_, *job, /*with_parameters=*/true);
}

absl::StatusOr<v1::Job> EngineTransport::GetJob(const v1::GetJobRequest& request) {
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, Find(request.name()));
  return server::ToMessage(engine_, *job, request.with_parameters());
}

absl::StatusOr<v1::AttachWorkerResponse> EngineTransport::AttachWorker(
    const v1::AttachWorkerRequest& request, absl::Duration limit) {
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, Find(request.name()));
  AttachRequest attach = {
      .rank = request.rank(), .process_id = request.process_id(), .uid = request.uid()};
  if (request.has_generation()) attach.generation = proto::FromProto(request.generation());
  if (request.has_expected_committed_step()) {
    attach.expected_committed_step = request.expected_committed_step();
  }
  if (request.has_job()) {
    BALLAST_ASSIGN_OR_RETURN(attach.spec, proto::FromProto(request.job()));
  }
  BALLAST_ASSIGN_OR_RETURN(const Attachment attachment, job->Attach(attach));
  v1::AttachWorkerResponse response;
  response.set_uid(job->uid());
  response.set_instance_id(engine_.instance_id());
  *response.mutable_generation() = proto::ToProto(attachment.generation);
  response.set_committed_step(attachment.committed_step);
  response.set_awaiting_weights(attachment.awaiting_weights);
  *response.mutable_job() = server::ToMessage(engine_, *job, /*with_parameters=*/true);
  return response;
}

absl::StatusOr<v1::UndoStepResponse> EngineTransport::UndoStep(const v1::UndoStepRequest& request) {
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, Find(request.name()));
  BALLAST_ASSIGN_OR_RETURN(const uint64_t undone,
                           job->UndoStep({.step = request.step(),
                                          .generation = proto::FromProto(request.generation())}));
  v1::UndoStepResponse response;
  response.set_undone_step(undone);
  return response;
}

absl::StatusOr<v1::SaveJobResponse> EngineTransport::SaveJob(const v1::SaveJobRequest& request) {
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, Find(request.name()));
  BALLAST_RETURN_IF_ERROR(job->Save(request.directory()).status());
  return v1::SaveJobResponse();
}

absl::StatusOr<v1::LoadJobResponse> EngineTransport::LoadJob(const v1::LoadJobRequest& request) {
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, Find(request.name()));
  BALLAST_RETURN_IF_ERROR(job->Load(request.directory()).status());
  return v1::LoadJobResponse();
}

absl::StatusOr<v1::UploadWeightsResponse> EngineTransport::UploadWeights(
    const v1::OpenTrain& open, absl::Duration limit, absl::Span<const int> chunks,
    const std::function<std::vector<float>(int chunk)>& fill) {
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, Find(open.name()));
  BALLAST_ASSIGN_OR_RETURN(
      const Job::Uploader uploader,
      job->BeginFirstWeights({.rank = open.rank(),
                              .process_id = open.process_id(),
                              .generation = proto::FromProto(open.generation())},
                             /*state=*/{}));
  for (const int chunk : chunks) {
    const std::vector<float> values = fill(chunk);
    const absl::Span<const std::byte> piece(reinterpret_cast<const std::byte*>(values.data()),
                                            values.size() * sizeof(float));
    const int64_t in_job = int64_t{chunk} + job->layout().first_of_rank(open.rank());
    BALLAST_RETURN_IF_ERROR(job->WriteInitialWeights(in_job, {piece}, uploader).status());
  }
  v1::UploadWeightsResponse response;
  response.set_chunks(static_cast<int64_t>(chunks.size()));
  return response;
}

absl::StatusOr<uint64_t> EngineTransport::ReadWeights(
    const v1::ReadWeightsRequest& request, absl::Duration limit,
    const std::function<absl::Status(const v1::WeightHeader& header,
                                     client::PayloadPieces payload)>& place) {
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, Find(request.name()));
  const JobStatus status = job->Status();
  const uint64_t step = status.committed_step;
  if (request.has_step() && request.step() != step) {
    return absl::FailedPreconditionError("the job stands at another step");
  }
  for (const uint32_t chunk : request.chunks()) {
    const int in_job = static_cast<int>(chunk) + job->layout().first_of_rank(request.rank());
    BALLAST_ASSIGN_OR_RETURN(const server::OwnedWeights weights,
                             server::ReadWeights(*job, status.generation, step, in_job));
    BALLAST_RETURN_IF_ERROR(
        place(server::MakeWeightHeader(step, static_cast<int>(chunk)), {weights.bytes()}));
  }
  return step;
}

std::unique_ptr<client::TrainCall> EngineTransport::OpenTrainCall(client::TrainListener& listener) {
  return std::make_unique<EngineStream>(engine_, wires_, rank_, listener);
}

}  // namespace ballast::histories
