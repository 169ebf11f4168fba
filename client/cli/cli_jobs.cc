// jobs, job, history, abort-step, undo, close.
#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/calls/service.h"
#include "client/cli/cli_command.h"
#include "client/cli/cli_print.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "proto/message_json.h"

namespace ballast::client::cli {
namespace {

absl::StatusOr<Action> PrepareJobs(const Arguments& arguments) {
  return [](Service& service, bool json) -> absl::StatusOr<std::string> {
    BALLAST_ASSIGN_OR_RETURN(
        const auto response,
        service.Call<v1::ListJobsResponse>("JobService/ListJobs", v1::ListJobsRequest()));
    return json ? proto::ToJson(response) : JobsText(response);
  };
}

absl::StatusOr<Action> PrepareJob(const Arguments& arguments) {
  return
      [job = arguments.positional(0)](Service& service, bool json) -> absl::StatusOr<std::string> {
        BALLAST_ASSIGN_OR_RETURN(const v1::Job response, service.GetJobOfAll(job));
        return json ? proto::ToJson(response) : JobText(response);
      };
}

absl::StatusOr<Action> PrepareHistory(const Arguments& arguments) {
  return
      [job = arguments.positional(0)](Service& service, bool json) -> absl::StatusOr<std::string> {
        BALLAST_ASSIGN_OR_RETURN(const v1::Job response, service.GetJob(job, false));
        return json ? proto::ToJson(response) : StepHistoryText(response);
      };
}

absl::StatusOr<Action> PrepareAbortStep(const Arguments& arguments) {
  return [job = arguments.positional(0)](Service& service,
                                         bool json) -> absl::StatusOr<std::string> {
    v1::AbortStepRequest request;
    request.set_name(proto::JobName(job));
    BALLAST_ASSIGN_OR_RETURN(const auto response,
                             service.Call<v1::AbortStepResponse>("JobService/AbortStep", request));
    if (json) return proto::ToJson(response);
    const std::string step = absl::StrCat("step ", response.aborted_step(), " of job ", job);
    const v1::Job now = service.GetJob(job, false).value_or(v1::Job());
    // Of a job that skips what cannot be kept the step is committed, if all ranks had begun it.
    for (const v1::StepRecord& record : now.recent_steps()) {
      if (record.step() != response.aborted_step()) continue;
      return absl::StrCat(step, record.applied()
                                    ? " is applied; the service orthogonalizes its directions\n"
                                    : " skipped on all ranks, which go on\n");
    }
    return absl::StrCat(step, " aborted; ", kRanksMustReturn);
  };
}

absl::StatusOr<Action> PrepareUndo(const Arguments& arguments) {
  return [job = arguments.positional(0)](Service& service,
                                         bool json) -> absl::StatusOr<std::string> {
    // What is seen now goes with the request. It may then be repeated after a lost answer, and the
    // step is undone only once.
    BALLAST_ASSIGN_OR_RETURN(const v1::Job now, service.GetJob(job, false));
    v1::UndoStepRequest request;
    request.set_name(proto::JobName(job));
    request.set_step(now.committed_step());
    *request.mutable_generation() = now.generation();
    BALLAST_ASSIGN_OR_RETURN(
        const auto response,
        service.Call<v1::UndoStepResponse>("JobService/UndoStep", request, Service::Repeat::kYes));
    if (json) return proto::ToJson(response);
    return absl::StrCat("step ", response.undone_step(), " of job ", job,
                        " undone; the job is at step ", response.undone_step() - 1, "; ",
                        kRanksMustReturn);
  };
}

// How long workers that have ended may take to be seen as gone.
constexpr std::chrono::seconds kLeaving(2);
constexpr absl::Duration kLookEvery = absl::Milliseconds(50);

// FAILED_PRECONDITION: workers are attached to the job, or may be, at a member that does not answer.
// With `here` only those of the service that is asked count.
absl::StatusOr<std::string> UidOfIdleJob(Service& service, const std::string& job, bool here) {
  const auto end = std::chrono::steady_clock::now() + kLeaving;
  while (true) {
    BALLAST_ASSIGN_OR_RETURN(const v1::Job now,
                             here ? service.GetJob(job, false) : service.GetJobOfAll(job));
    for (const v1::JobMember& member : now.members()) {
      if (here || member.problem().empty()) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "member ", member.address(), " of job ", job, " may have workers: ", member.problem(),
          "; close it all the same, and lose all its state: ballast close ", job, " --force"));
    }
    const auto attached =
        std::count_if(now.ranks().begin(), now.ranks().end(),
                      [](const v1::RankProgress& rank) { return rank.attached(); });
    if (attached == 0) return now.uid();
    if (std::chrono::steady_clock::now() >= end) {
      return absl::FailedPreconditionError(absl::StrCat(
          "job ", job, " is in training: ", attached, " of ", now.world_size(),
          " workers are attached, at step ", now.committed_step(),
          "; stop them, or close it and lose all its state: ballast close ", job, " --force"));
    }
    absl::SleepFor(kLookEvery);
  }
}

absl::StatusOr<Action> PrepareClose(const Arguments& arguments) {
  return [job = arguments.positional(0), force = arguments.Has("force"),
          here = arguments.Has("here")](Service& service,
                                        bool json) -> absl::StatusOr<std::string> {
    if (here && !service.cluster().empty()) {
      return absl::InvalidArgumentError(
          "--here is of one service; give its address: --service=HOST:PORT");
    }
    v1::CloseJobRequest request;
    request.set_name(proto::JobName(job));
    request.set_here(here);
    // The uid goes along: if another job has taken the name since that look at it, that one is not
    // closed.
    if (!force) {
      BALLAST_ASSIGN_OR_RETURN(const std::string uid, UidOfIdleJob(service, job, here));
      request.set_uid(uid);
    }
    BALLAST_ASSIGN_OR_RETURN(const auto response,
                             service.Call<v1::CloseJobResponse>("JobService/CloseJob", request));
    if (json) return proto::ToJson(response);
    return absl::StrCat("job ", job, " closed; its state is gone\n");
  };
}

}  // namespace

Command JobsCommand() {
  return {.spec = {.name = "jobs",
                   .positionals = {},
                   .summary = "lists the jobs and the memory in use",
                   .details = "",
                   .flags = {}},
          .prepare = PrepareJobs};
}

Command JobCommand() {
  return {.spec = {.name = "job",
                   .positionals = {"JOB"},
                   .summary =
                       "a job's phase, its members, each rank's progress, and the last decisions",
                   .details = "",
                   .flags = {}},
          .prepare = PrepareJob};
}

Command HistoryCommand() {
  return {
      .spec = {.name = "history",
               .positionals = {"JOB"},
               .summary = "the last steps: norm, clipping, learning rate, time, skips",
               .details =
                   "Oldest first. For each group's hyper-parameters: ballast groups JOB --history.",
               .flags = {}},
      .prepare = PrepareHistory};
}

Command AbortStepCommand() {
  return {.spec = {.name = "abort-step",
                   .positionals = {"JOB"},
                   .summary = "clears the undecided step and ends the sessions of all ranks",
                   .details = absl::StrCat(
                       "Refused once the step is decided: then it can only be completed.\n\n",
                       kGenerationRises),
                   .flags = {}},
          .prepare = PrepareAbortStep};
}

Command UndoCommand() {
  return {
      .spec = {.name = "undo",
               .positionals = {"JOB"},
               .summary = "undoes the last committed step exactly, after a loss has exploded",
               .details = absl::StrCat("Needs a job created with keep_previous. Only one step can "
                                       "be undone; a second one takes a\ncheckpoint. Refused once "
                                       "the next step has begun; abort-step it first.\n\n",
                                       kGenerationRises),
               .flags = {}},
      .prepare = PrepareUndo};
}

Command CloseCommand() {
  return {
      .spec = {.name = "close",
               .positionals = {"JOB"},
               .summary = "deletes the job and all its state; save it first",
               .details = "Refused while workers are attached: their training would end.",
               .flags = {{"force", "", "also during a training"},
                         {"here", "",
                          "of a job with several members only the part that this service has; for "
                          "what is left when the lead is gone"}}},
      .timeout_seconds = 300,  // Much memory takes long to be given back.
      .prepare = PrepareClose};
}

}  // namespace ballast::client::cli
