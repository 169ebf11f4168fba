#include "server/jobs/job_service.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "proto/frame.h"
#include "proto/status.h"
#include "server/find_job.h"
#include "server/jobs/history_message.h"
#include "server/jobs/job_description.h"
#include "server/jobs/job_message.h"
#include "server/jobs/trace_call.h"
#include "server/transport_settings.h"

namespace ballast::server {
namespace {

// A checkpoint of the new job's name is of an earlier job, which its user may have meant to go on
// with.
void TellOfCheckpoint(const Engine& engine, const Job& job, v1::Job& response) {
  if (!AddFoundCheckpoint(engine, job, response)) return;
  const v1::SavedCheckpoint& found = response.found_checkpoint();
  const std::string& name = job.spec().name;
  spdlog::warn("job {} is new; to go on from the checkpoint at step {} in {}: {}", name,
               found.step(), found.directory(), HowToResume(name));
}

// Any job of the name, if no uid is given.
absl::StatusOr<std::shared_ptr<Job>> Find(const Engine& engine, const Caller& caller,
                                          const std::string& name, const std::string& uid) {
  return uid.empty() ? FindJob(engine, caller, name) : FindJob(engine, caller, name, uid);
}

absl::Status CheckReplies(const JobSpec& spec) {
  // A reply repeats names: those of a job in each of its parameters, those of parameters in each
  // rank and in each step. So their lengths come first.
  BALLAST_RETURN_IF_ERROR(Validate(spec));
  BALLAST_RETURN_IF_ERROR(CheckParameters(spec.layout));
  // It names parameters in full, so it may be larger than the request, and training makes it grow.
  const size_t reply_bytes = LargestMessageBytes(spec);
  if (reply_bytes <= size_t{kMaxMessageBytes}) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the description of job ", spec.name, " may take ", reply_bytes,
                   " bytes in a reply, more than ", kMaxMessageBytes,
                   "; give the job and its parameters shorter names"));
}

v1::Job CreatedMessage(const Engine& engine, const Job& job) {
  v1::Job message = ToMessage(engine, job, /*with_parameters=*/true);
  if (job.derivation().is_from_nothing()) TellOfCheckpoint(engine, job, message);
  if (const std::string& why = message.speculation().unavailable(); !why.empty()) {
    spdlog::warn("job {} does not speculate, and updates after each decision: {}", job.spec().name,
                 why);
  }
  return message;
}

// Offers memory to a process that has just attached. One that reopens its stream has it already.
void OfferSharedMemory(SharedMemoryServer& server, const std::shared_ptr<Job>& job,
                       const v1::AttachWorkerRequest& request, v1::AttachWorkerResponse& response) {
  if (!request.shared_memory() || request.has_generation()) return;
  std::optional<v1::SharedMemoryOffer> offer =
      server.Offer(job, {.rank = request.rank(),
                         .process_id = request.process_id(),
                         .generation = proto::FromProto(response.generation())});
  if (offer) *response.mutable_shared_memory() = *std::move(offer);
}

absl::StatusOr<AttachRequest> FromMessage(const v1::AttachWorkerRequest& request) {
  AttachRequest attach = {.rank = request.rank(),
                          .process_id = request.process_id(),
                          .uid = request.uid(),
                          .expected_committed_step = {},
                          .spec = {},
                          .generation = {}};
  if (request.has_generation()) attach.generation = proto::FromProto(request.generation());
  attach.rejoin = request.rejoin();
  if (request.has_expected_committed_step()) {
    attach.expected_committed_step = request.expected_committed_step();
  }
  if (request.has_job()) {
    BALLAST_ASSIGN_OR_RETURN(attach.spec, proto::FromProto(request.job()));
  }
  return attach;
}

using JobsByName = std::map<std::string, std::shared_ptr<const Job>>;

// What is under way beside those jobs, and is the caller's to see: what is of no job, only where all
// jobs are.
void AddActivities(const Engine& engine, const Caller& caller, const JobsByName& jobs,
                   v1::ListJobsResponse& response) {
  for (const Activity& activity : engine.ListActivities()) {
    if (jobs.contains(activity.job)) continue;
    if (!caller.MayUse(activity.job)) continue;
    *response.add_activities() = proto::ToProto(activity);
  }
}

}  // namespace

JobService::JobService(Engine& engine, const Access& access, CallPools& pools,
                       const CheckpointPaths& paths, SharedMemoryServer* shared_memory_server)
    : RawService(access),
      engine_(engine),
      paths_(paths),
      shared_memory_server_(shared_memory_server) {
  Unary("CreateJob", pools.creation, &JobService::Create);
  Unary("GetJob", pools.control, &JobService::Get);
  Unary("ListJobs", pools.control, &JobService::List);
  // In `creation`, because the engine frees the job's memory before it answers.
  Unary("CloseJob", pools.creation, &JobService::Close);
  Unary("AttachWorker", pools.control, &JobService::Attach);
  Unary("AbortStep", pools.control, &JobService::Abort);
  Unary("UndoStep", pools.control, &JobService::Undo);
  Unary("UpdateGroup", pools.control, &JobService::Update);
  Unary("GetHistory", pools.control, &JobService::History);
  Writes("TraceJob", [this, &pools](grpc::CallbackServerContext& context,
                                    const absl::StatusOr<Caller>& caller, const Bytes& request) {
    return new TraceCall(engine_, pools, context, caller, request);
  });
}

absl::Status JobService::Create(UnaryCall& call, const grpc::ByteBuffer& bytes) {
  Derivation derivation;
  JobSpec spec;
  {
    BALLAST_ASSIGN_OR_RETURN(const auto room, RoomToRead(engine_, bytes));
    BALLAST_ASSIGN_OR_RETURN(const auto request, proto::ParseControl<v1::CreateJobRequest>(bytes));
    BALLAST_ASSIGN_OR_RETURN(spec, proto::FromProto(request.job()));
    // The caller can only be checked after parsing: the name is a part of the description.
    BALLAST_RETURN_IF_ERROR(call.caller().Check(spec.name));
    BALLAST_RETURN_IF_ERROR(CheckReplies(spec));
    derivation.uid = request.derive_from().uid();
    if (const std::string& from = request.derive_from().checkpoint(); !from.empty()) {
      BALLAST_ASSIGN_OR_RETURN(derivation.checkpoint, paths_.Resolve(from, call.caller()));
    }
  }
  BALLAST_ASSIGN_OR_RETURN(const std::optional<Registration::Claim> claim,
                           TakeName(derivation, spec));
  return call.Await<std::shared_ptr<Job>>(
      [&](Done<std::shared_ptr<Job>> done) {
        engine_.CreateJob(std::move(spec), std::move(derivation),
                          [this, claim, done = std::move(done)](
                              absl::StatusOr<std::shared_ptr<Job>> created) mutable {
                            if (claim.has_value() && !created.ok()) registration_->GiveBack(*claim);
                            std::move(done)(std::move(created));
                          });
        return Pending();  // What has been begun is made, whether its caller waits for it or not.
      },
      [this, claim](const std::shared_ptr<Job>& job) -> absl::StatusOr<v1::Job> {
        if (claim.has_value()) {
          const absl::Status kept = registration_->Keep(*claim, *job);
          if (!kept.ok()) {
            engine_.CloseJob(job, [](const absl::StatusOr<bool>&) {});
            return kept;
          }
        }
        return CreatedMessage(engine_, *job);
      });
}

// A job derived from another has its name already.
absl::StatusOr<std::optional<Registration::Claim>> JobService::TakeName(
    const Derivation& derivation, JobSpec& spec) const {
  if (!derivation.uid.empty()) {
    const absl::StatusOr<std::shared_ptr<Job>> origin = engine_.FindJob(spec.name);
    if (origin.ok()) spec.epoch = (*origin)->spec().epoch;
    return std::nullopt;
  }
  if (registration_ != nullptr) {
    BALLAST_ASSIGN_OR_RETURN(Registration::Claim claim, registration_->Take(spec));
    spec.epoch = claim.record.job.epoch();
    return claim;
  }
  // Of checkpoints the one with the highest epoch is loaded first.
  if (engine_.checkpoints() != nullptr) {
    const std::optional<CheckpointFacts> found = engine_.checkpoints()->Find(spec.name);
    if (found.has_value()) spec.epoch = std::max<uint64_t>(found->epoch, 1);
  }
  return std::nullopt;
}

absl::StatusOr<v1::Job> JobService::Get(const Caller& caller,
                                        const v1::GetJobRequest& request) const {
  const absl::StatusOr<std::shared_ptr<Job>> job =
      Find(engine_, caller, request.name(), request.uid());
  if (job.ok()) return ToMessage(engine_, **job, request.with_parameters());
  if (ReasonOf(job.status()) != reason::kJobBeingCreated) return job.status();
  for (const std::shared_ptr<const Job>& creating : engine_.JobsBeingCreated()) {
    if (proto::JobName(creating->spec().name) != request.name()) continue;
    return CreatingMessage(engine_, *creating);
  }
  // It has its memory by now, or there was none for it.
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> made,
                           FindJob(engine_, caller, request.name()));
  return ToMessage(engine_, *made, request.with_parameters());
}

// Those that the caller may see.
absl::StatusOr<v1::ListJobsResponse> JobService::List(const Caller& caller,
                                                      const v1::ListJobsRequest& request) const {
  const std::string& after = request.page_token();
  v1::ListJobsResponse response;
  response.set_instance_id(engine_.instance_id());
  response.set_memory_used_bytes(engine_.memory().used_bytes());
  response.set_memory_limit_bytes(engine_.memory().limit_bytes());
  response.set_advertised_address(advertised_);
  size_t page_bytes = 0;
  std::set<std::string> being_created;
  // By name, and of one name in both lists, which is ready by now, only that.
  JobsByName jobs;
  const std::vector<std::shared_ptr<const Job>> creating = engine_.JobsBeingCreated();
  for (const std::shared_ptr<Job>& job : engine_.ListJobs()) jobs[job->spec().name] = job;
  for (const std::shared_ptr<const Job>& job : creating) {
    if (jobs.try_emplace(job->spec().name, job).second) being_created.insert(job->spec().name);
  }
  if (after.empty()) AddActivities(engine_, caller, jobs, response);
  for (const auto& [name, job] : jobs) {
    // Jobs come by name, so a page goes on behind a name even if that job is closed by now.
    if (!after.empty() && name <= after) continue;
    if (!caller.MayUse(name)) continue;
    v1::Job message = being_created.contains(name)
                          ? CreatingMessage(engine_, *job)
                          : ToMessage(engine_, *job, /*with_parameters=*/false);
    page_bytes += message.ByteSizeLong();
    if (page_bytes > kPageBytes && response.jobs_size() > 0) {
      const std::string& last = response.jobs(response.jobs_size() - 1).name();
      response.set_next_page_token(last.substr(last.rfind('/') + 1));
      break;
    }
    *response.add_jobs() = std::move(message);
  }
  return response;
}

absl::Status JobService::Close(UnaryCall& call, const v1::CloseJobRequest& request) {
  BALLAST_ASSIGN_OR_RETURN(std::shared_ptr<Job> job,
                           Find(engine_, call.caller(), request.name(), request.uid()));
  // A part that goes alone leaves the record, by which the other ones are found.
  const bool frees_name = registration_ != nullptr && !request.here();
  const std::string name = job->spec().name;
  const std::string uid = job->uid();
  // Not by its name, which may be another job's by now.
  return call.Await<bool>(
      [&](Done<bool> done) {
        return engine_.CloseJob(std::move(job), std::move(done), request.here());
      },
      [this, frees_name, name, uid](bool) -> absl::StatusOr<v1::CloseJobResponse> {
        if (frees_name) registration_->Closed(name, uid);
        return v1::CloseJobResponse();
      });
}

// The description may be large, so it is parsed, and later made, in the pool.
absl::Status JobService::Attach(UnaryCall& call, const grpc::ByteBuffer& bytes) {
  BALLAST_ASSIGN_OR_RETURN(const JobToAttach wanted, FindJobToAttach(bytes));
  BALLAST_ASSIGN_OR_RETURN(
      const std::shared_ptr<Job> job,
      wanted.derived_from.empty()
          ? Find(engine_, call.caller(), wanted.name, wanted.uid)
          : FindDerived(engine_, call.caller(), wanted.name, wanted.derived_from));
  // The job bounds what a worker may say of it, so it has to be found before that is parsed.
  BALLAST_RETURN_IF_ERROR(CheckAsLargeAs(*job, bytes));
  BALLAST_ASSIGN_OR_RETURN(auto request, proto::ParseControl<v1::AttachWorkerRequest>(bytes));
  BALLAST_ASSIGN_OR_RETURN(AttachRequest attach, FromMessage(request));
  // `attach` has it now. It may be large, and the request is kept until the answer is made.
  request.clear_job();
  return call.Await<Attachment>(
      [&](Done<Attachment> done) { return job->Attach(std::move(attach), std::move(done)); },
      [this, job, request = std::move(request)](
          const Attachment& attachment) -> absl::StatusOr<v1::AttachWorkerResponse> {
        v1::AttachWorkerResponse message;
        message.set_uid(job->uid());
        message.set_instance_id(engine_.instance_id());
        *message.mutable_generation() = proto::ToProto(attachment.generation);
        message.set_committed_step(attachment.committed_step);
        message.set_awaiting_weights(attachment.awaiting_weights);
        if (shared_memory_server_ != nullptr) {
          OfferSharedMemory(*shared_memory_server_, job, request, message);
        }
        *message.mutable_job() = ToMessage(engine_, *job, /*with_parameters=*/true);
        return message;
      });
}

absl::Status JobService::Abort(UnaryCall& call, const v1::AbortStepRequest& request) {
  BALLAST_ASSIGN_OR_RETURN(std::shared_ptr<Job> job,
                           FindJob(engine_, call.caller(), request.name()));
  return call.Await<uint64_t>([&](Done<uint64_t> done) { return job->AbortStep(std::move(done)); },
                              [](uint64_t step) -> absl::StatusOr<v1::AbortStepResponse> {
                                v1::AbortStepResponse response;
                                response.set_aborted_step(step);
                                return response;
                              });
}

absl::Status JobService::Undo(UnaryCall& call, const v1::UndoStepRequest& request) {
  BALLAST_ASSIGN_OR_RETURN(std::shared_ptr<Job> job,
                           FindJob(engine_, call.caller(), request.name()));
  const Job::UndoRequest undo = {.step = request.step(),
                                 .generation = proto::FromProto(request.generation())};
  return call.Await<uint64_t>(
      [&](Done<uint64_t> done) { return job->UndoStep(undo, std::move(done)); },
      [](uint64_t step) -> absl::StatusOr<v1::UndoStepResponse> {
        v1::UndoStepResponse response;
        response.set_undone_step(step);
        return response;
      });
}

absl::StatusOr<v1::ParamGroup> JobService::Update(const Caller& caller,
                                                  const v1::UpdateGroupRequest& request) const {
  BALLAST_ASSIGN_OR_RETURN(const proto::ResourceName name, proto::ParseGroupName(request.name()));
  BALLAST_RETURN_IF_ERROR(caller.Check(name.job));
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, engine_.FindJob(name.job));
  BALLAST_ASSIGN_OR_RETURN(const HyperParameterOverrides changes,
                           proto::OverridesFromProto(request.changes()));
  const std::vector<GroupSpec>& groups = job->spec().groups;
  for (size_t group = 0; group < groups.size(); ++group) {
    if (groups[group].name != name.child) continue;
    BALLAST_ASSIGN_OR_RETURN(const HyperParameters values,
                             job->UpdateGroup(static_cast<int>(group), changes));
    return ToMessage(*job, static_cast<int>(group), values);
  }
  return absl::NotFoundError(absl::StrCat("job ", name.job, " has no group '", name.child,
                                          "'; GetJob names those that it has"));
}

absl::StatusOr<v1::JobHistory> JobService::History(const Caller& caller,
                                                   const v1::GetHistoryRequest& request) const {
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job,
                           FindJob(engine_, caller, request.name()));
  return ToMessage(job->History({.first_step = request.first_step(),
                                 .last_step = request.last_step(),
                                 .max_entries = request.max_entries()}));
}

}  // namespace ballast::server
