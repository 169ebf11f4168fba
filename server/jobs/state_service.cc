#include "server/jobs/state_service.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/checkpoint_name.h"
#include "proto/convert.h"
#include "server/find_job.h"
#include "server/jobs/state_reader.h"
#include "server/jobs/state_writer.h"

namespace ballast::server {
namespace {

v1::Checkpoint ToProto(const FoundCheckpoint& found, const CheckpointDirectory* names) {
  const CheckpointFacts& facts = found.facts;
  v1::Checkpoint to;
  to.set_directory(facts.directory);
  to.set_name(names != nullptr ? names->NameOf(facts.directory) : facts.directory);
  to.set_job(facts.job);
  to.set_uid(facts.uid);
  to.set_step(facts.step);
  to.set_epoch(facts.epoch);
  to.set_generation(facts.generation);
  to.set_size_bytes(facts.size_bytes);
  to.set_saved_unix_ms(facts.saved_unix_ms);
  to.set_asked_for(facts.asked_for);
  to.set_problem(std::string(found.problem.message()));
  return to;
}

// Of a checkpoint's name, "gpt/step-1000.2".
std::string FolderOf(const std::string& name) { return name.substr(0, name.find('/')); }

// Of all folders, whole ones are looked at until there are so many.
constexpr size_t kPageCheckpoints = 4096;
// The token of the page behind all of a folder: "gpt/".
constexpr char kWholeFolder[] = "/";

// Those behind the one of the name `after`, as far as a page goes. ABORTED: there is no such one.
absl::StatusOr<v1::ListCheckpointsResponse> Page(const std::vector<FoundCheckpoint>& found,
                                                 const CheckpointDirectory* names,
                                                 const std::string& after) {
  v1::ListCheckpointsResponse response;
  size_t bytes = 0;
  bool is_behind = after.empty();
  std::string last;
  for (const FoundCheckpoint& each : found) {
    v1::Checkpoint checkpoint = ToProto(each, names);
    // The list is not in the order of names, so a page goes on behind the place where the name
    // stands.
    if (!is_behind) {
      is_behind = checkpoint.name() == after;
      continue;
    }
    bytes += checkpoint.ByteSizeLong();
    if (bytes > kPageBytes && !last.empty()) {
      response.set_next_page_token(last);
      return response;
    }
    last = checkpoint.name();
    *response.add_checkpoints() = std::move(checkpoint);
  }
  if (!is_behind) {
    return absl::AbortedError(
        absl::StrCat("checkpoint ", after,
                     " ended the previous page and no longer exists; list the checkpoints again"));
  }
  return response;
}

// A job's checkpoints are under its name, unless another place is given.
std::string DirectoryOf(const std::string& given, const Job& job) {
  return given.empty() ? job.spec().name : given;
}

}  // namespace

v1::StateSummary SummaryOf(const FoundParameter& parameter, const Snapshot& snapshot,
                           bool with_sums) {
  v1::StateSummary response;
  const JobSpec& job = parameter.job->spec();
  response.set_name(proto::ParameterName(job.name, parameter.spec().name));
  response.set_step(snapshot.step());
  *response.mutable_generation() = proto::ToProto(snapshot.generation());
  response.set_state_writes(snapshot.state_writes());
  response.set_loads(snapshot.loads());
  response.mutable_shape()->Add(parameter.spec().shape.begin(), parameter.spec().shape.end());
  response.set_group(proto::GroupName(job.name, job.groups[parameter.spec().group].name));
  response.set_trainable(parameter.spec().trainable);
  response.set_update_count(snapshot.update_count(parameter.index));
  if (!parameter.spec().trainable) return response;
  const std::vector<ElementRange> here = ElementsHere(*parameter.job, parameter.index);
  for (const Plane plane : snapshot.planes(parameter.index)) {
    *response.add_planes() =
        proto::ToProto(Summarize(snapshot, parameter.index, here, plane), plane, with_sums);
  }
  return response;
}

StateService::StateService(Engine& engine, const Access& access, CallPools& pools,
                           const CheckpointPaths& paths)
    : RawService(access), engine_(engine), paths_(paths) {
  Writes("ReadState", [this, &pools](grpc::CallbackServerContext& context,
                                     const absl::StatusOr<Caller>& caller, const Bytes& request) {
    return new StateReader(engine_, pools, context, caller, request);
  });
  Reads("WriteState", [this, &pools](grpc::CallbackServerContext& context,
                                     const absl::StatusOr<Caller>& caller, Bytes& response) {
    return new StateWriter(engine_, pools, context, caller, response);
  });
  // Only the snapshot waits for training, and it copies nothing; its planes are read in the pool.
  Unary("SummarizeState", pools.readers, &StateService::Summarize);
  Unary("SaveJob", pools.control, &StateService::Save);
  Unary("LoadJob", pools.control, &StateService::Load);
  Unary("ListCheckpoints", pools.control, &StateService::List);
  Unary("VerifyCheckpoints", pools.control, &StateService::Verify);
  Unary("DeleteCheckpoint", pools.control, &StateService::Delete);
}

absl::Status StateService::Summarize(UnaryCall& call, const v1::SummarizeStateRequest& request) {
  BALLAST_ASSIGN_OR_RETURN(FoundParameter parameter,
                           FindParameter(engine_, call.caller(), request.name(), request.uid()));
  if (!request.here()) BALLAST_RETURN_IF_ERROR(CheckIsHere(*parameter.job, parameter.index));
  return call.Await<Snapshot>(
      [&](Done<Snapshot> done) {
        return parameter.job->TakeSnapshot({parameter.index}, std::move(done));
      },
      [parameter,
       here = request.here()](const Snapshot& snapshot) -> absl::StatusOr<v1::StateSummary> {
        return SummaryOf(parameter, snapshot, /*with_sums=*/here);
      });
}

absl::Status StateService::Save(UnaryCall& call, const v1::SaveJobRequest& request) {
  BALLAST_ASSIGN_OR_RETURN(std::shared_ptr<Job> job,
                           FindJob(engine_, call.caller(), request.name()));
  BALLAST_ASSIGN_OR_RETURN(std::string folder,
                           paths_.Resolve(DirectoryOf(request.directory(), *job), call.caller()));
  return call.Await<CheckpointInfo>(
      [&](Done<CheckpointInfo> done) {
        return job->Save({.folder = folder, .background = request.background()}, std::move(done));
      },
      [](const CheckpointInfo& saved) -> absl::StatusOr<v1::SaveJobResponse> {
        v1::SaveJobResponse response;
        response.set_directory(saved.directory);
        response.set_step(saved.step);
        response.set_bytes(saved.size_bytes);
        return response;
      });
}

absl::Status StateService::Load(UnaryCall& call, const v1::LoadJobRequest& request) {
  BALLAST_ASSIGN_OR_RETURN(std::shared_ptr<Job> job,
                           FindJob(engine_, call.caller(), request.name()));
  BALLAST_ASSIGN_OR_RETURN(std::string path,
                           paths_.Resolve(DirectoryOf(request.directory(), *job), call.caller()));
  return call.Await<CheckpointInfo>(
      [&](Done<CheckpointInfo> done) {
        return job->Load({.path = path,
                          .weights_only = request.weights_only(),
                          .convert_state = request.convert_state()},
                         std::move(done));
      },
      [](const CheckpointInfo& loaded) -> absl::StatusOr<v1::LoadJobResponse> {
        v1::LoadJobResponse response;
        response.set_step(loaded.step);
        *response.mutable_generation() = proto::ToProto(loaded.generation);
        response.set_directory(loaded.directory);
        for (const std::string& damage : loaded.passed_over) response.add_passed_over(damage);
        return response;
      });
}

absl::Status StateService::List(UnaryCall& call, const v1::ListCheckpointsRequest& request) {
  const bool all = request.directory().empty();
  Engine::LookRequest look;
  std::string after = request.page_token();
  if (all) {
    // Of those that are not the caller's to see none is even found: no page's token can name one,
    // and no page is empty because of them.
    look.wanted = call.caller().MayUseNow();
    look.from_folder = FolderOf(after);
    // Each index is read for the list, so not more folders than a page needs.
    look.enough = kPageCheckpoints;
    if (absl::EndsWith(after, kWholeFolder)) {  // From the next one on.
      // A zero byte behind a name makes the smallest text above it.
      look.from_folder.push_back('\0');
      after.clear();
    }
  } else {
    BALLAST_ASSIGN_OR_RETURN(std::string path, paths_.Resolve(request.directory(), call.caller()));
    look.path = std::move(path);
  }
  return call.Await<std::vector<FoundCheckpoint>>(
      [&](Done<std::vector<FoundCheckpoint>> done) {
        return engine_.LookForCheckpoints(std::move(look), std::move(done));
      },
      [this, all, after = std::move(after)](const std::vector<FoundCheckpoint>& found)
          -> absl::StatusOr<v1::ListCheckpointsResponse> {
        BALLAST_ASSIGN_OR_RETURN(v1::ListCheckpointsResponse page,
                                 Page(found, engine_.checkpoints(), after));
        // All that was found is in this page, but the look has ended because it was enough: there
        // may be more folders.
        if (all && page.next_page_token().empty() && found.size() >= kPageCheckpoints) {
          page.set_next_page_token(absl::StrCat(
              FolderOf(ToProto(found.back(), engine_.checkpoints()).name()), kWholeFolder));
        }
        return page;
      });
}

absl::Status StateService::Verify(UnaryCall& call, const v1::VerifyCheckpointsRequest& request) {
  const std::string& directory = request.directory();
  BALLAST_ASSIGN_OR_RETURN(std::string path, paths_.Resolve(directory, call.caller()));
  // A folder of checkpoints has its job's name.
  const std::string job = IsCheckpointName(directory) ? FolderOf(directory) : "";
  return call.Await<std::vector<FoundCheckpoint>>(
      [&](Done<std::vector<FoundCheckpoint>> done) {
        return engine_.LookForCheckpoints({.path = path, .verified = true, .job = job},
                                          std::move(done));
      },
      [this](const std::vector<FoundCheckpoint>& found)
          -> absl::StatusOr<v1::ListCheckpointsResponse> {
        v1::ListCheckpointsResponse response;
        for (const FoundCheckpoint& each : found) {
          *response.add_checkpoints() = ToProto(each, engine_.checkpoints());
        }
        return response;
      });
}

absl::Status StateService::Delete(UnaryCall& call, const v1::DeleteCheckpointRequest& request) {
  BALLAST_ASSIGN_OR_RETURN(std::string path, paths_.Resolve(request.directory(), call.caller()));
  return call.Await<std::vector<FoundCheckpoint>>(
      [&](Done<std::vector<FoundCheckpoint>> done) {
        return engine_.DeleteCheckpoints({.path = std::move(path), .uid = request.uid()},
                                         std::move(done));
      },
      [this](const std::vector<FoundCheckpoint>& deleted)
          -> absl::StatusOr<v1::DeleteCheckpointResponse> {
        v1::DeleteCheckpointResponse response;
        for (const FoundCheckpoint& each : deleted) {
          *response.add_checkpoints() = ToProto(each, engine_.checkpoints());
        }
        return response;
      });
}

}  // namespace ballast::server
