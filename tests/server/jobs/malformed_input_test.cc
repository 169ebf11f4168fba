// What malformed and impossible unary requests get: a named status, one line, and a service that
// runs on.
#include "tests/server/jobs/malformed_input.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "proto/convert.h"
#include "proto/status.h"
#include "server/jobs/job_message.h"
#include "server/transport_settings.h"
#include "tests/server/grpc_refused.h"

namespace ballast::server {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

struct BadJob {
  const char* what;
  std::function<void(v1::Job&)> spoil;
};

TEST_F(MalformedInput, CreateJobRefusesWhatCanNeverWork) {
  const BadJob kBadJobs[] = {
      {"no name", [](v1::Job& job) { job.clear_name(); }},
      {"a name that leads out of a directory", [](v1::Job& job) { job.set_name("jobs/../x"); }},
      {"no ranks", [](v1::Job& job) { job.set_world_size(0); }},
      {"negative ranks", [](v1::Job& job) { job.set_world_size(-1); }},
      {"two billion ranks", [](v1::Job& job) { job.set_world_size(2000000000); }},
      {"a gap", [](v1::Job& job) { job.mutable_partitions(1)->set_end(256 + 0); }},
      {"a gap at the end", [](v1::Job& job) { job.mutable_partitions()->RemoveLast(); }},
      {"an overlap", [](v1::Job& job) { job.mutable_partitions(1)->set_begin(0); }},
      {"a range past the end", [](v1::Job& job) { job.mutable_partitions(2)->set_end(512); }},
      {"half a block", [](v1::Job& job) { job.mutable_partitions(0)->set_end(255); }},
      {"a range that ends before it begins",
       [](v1::Job& job) { job.mutable_partitions(0)->set_end(-256); }},
      {"an endless range", [](v1::Job& job) { job.mutable_partitions(0)->set_end(kHuge); }},
      {"an unknown rank", [](v1::Job& job) { job.mutable_partitions(0)->set_rank(2); }},
      {"an unknown group", [](v1::Job& job) { job.mutable_partitions(0)->set_group(-1); }},
      {"a parameter of no group", [](v1::Job& job) { job.mutable_parameters(0)->set_group(7); }},
      {"a negative shape", [](v1::Job& job) { job.mutable_parameters(0)->set_shape(0, -3); }},
      {"a shape that overflows",
       [](v1::Job& job) {
         job.mutable_parameters(0)->set_shape(0, kHuge);
         job.mutable_parameters(0)->add_shape(kHuge);
       }},
      {"the same name twice", [](v1::Job& job) { job.mutable_parameters(0)->set_name("b"); }},
      {"no parameter name", [](v1::Job& job) { job.mutable_parameters(0)->clear_name(); }},
      {"the same group twice", [](v1::Job& job) { job.mutable_groups(1)->set_name("decay"); }},
      {"a missing lr",
       [](v1::Job& job) { job.mutable_groups(0)->mutable_hyper_parameters()->clear_lr(); }},
      {"beta of one",
       [](v1::Job& job) { job.mutable_groups(0)->mutable_hyper_parameters()->set_beta1(1); }},
      {"an lr that is no number",
       [](v1::Job& job) { job.mutable_groups(0)->mutable_hyper_parameters()->set_lr(NAN); }},
      {"an unknown dtype",
       [](v1::Job& job) { job.mutable_groups(0)->set_wire_dtype(static_cast<v1::DType>(9)); }},
      {"odd chunks", [](v1::Job& job) { job.set_chunk_elements(100); }},
      {"negative chunks", [](v1::Job& job) { job.set_chunk_elements(-256); }},
      {"huge chunks", [](v1::Job& job) { job.set_chunk_elements(kHuge); }},
      {"a member without an address",
       [](v1::Job& job) {
         job.add_members();
         job.add_homes(0);
         job.add_homes(0);
       }},
      {"homes without members", [](v1::Job& job) { job.add_homes(0); }},
      {"members without homes", [](v1::Job& job) { job.add_members()->set_address("a:7070"); }},
      {"more members than there may be",
       [](v1::Job& job) {
         for (int i = 0; i <= 1024; ++i) job.add_members()->set_address("a:7070");
       }},
      {"an on_abort that there is not",
       [](v1::Job& job) { job.set_on_abort(static_cast<v1::OnAbort>(7)); }},
  };
  for (const BadJob& bad : kBadJobs) {
    v1::Job job = TinyJob("bad");
    bad.spoil(job);
    ExpectRefused(Create(job), grpc::StatusCode::INVALID_ARGUMENT, bad.what);
  }
  EXPECT_TRUE(service_.engine().ListJobs().empty());
  EXPECT_EQ(service_.engine().memory().used_bytes(), 0);
}

TEST_F(MalformedInput, AJobThatDoesNotFitIsRefusedWithTheSizes) {
  v1::Job job = TinyJob("large");
  job.mutable_parameters(1)->set_shape(0, 84 + (int64_t{1} << 30));
  job.mutable_partitions(1)->set_end(512 + (int64_t{1} << 30));
  job.set_chunk_elements(0);
  const grpc::Status status = Create(job);
  ExpectRefused(status, grpc::StatusCode::RESOURCE_EXHAUSTED, "a large job");
  EXPECT_TRUE(Says(status.error_message()));
  EXPECT_EQ(service_.engine().memory().used_bytes(), 0);
}

// Frozen parameters: only the description is large.
v1::Job JobOfManyParameters(int count) {
  v1::Job job = TinyJob(std::string(128, 'j'));
  for (int i = 0; i < count; ++i) {
    v1::Parameter& parameter = *job.add_parameters();
    parameter.set_name(std::to_string(i));
    parameter.add_shape(1);
  }
  return job;
}

TEST_F(MalformedInput, AJobWhoseReplyWouldBeTooLargeIsRefusedBeforeItIsCreated) {
  const v1::Job job = JobOfManyParameters(200000);
  ASSERT_LT(job.ByteSizeLong(), kMaxMessageBytes / 4);
  const grpc::Status status = Create(job);
  ExpectRefused(status, grpc::StatusCode::INVALID_ARGUMENT, "a long description");
  EXPECT_TRUE(Says(status.error_message()));
  EXPECT_TRUE(service_.engine().ListJobs().empty());
}

TEST_F(MalformedInput, AJobWhoseReplyIsLargeIsCreatedAndAnswersAttach) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  service_.Use(grpc::CreateCustomChannel(service_.server().addresses()[0],
                                         grpc::InsecureChannelCredentials(), arguments));
  const grpc::Status status = Create(JobOfManyParameters(150000));
  ASSERT_TRUE(status.ok()) << status.error_message();
  TestWorker worker(service_, std::string(128, 'j'), 0, Codec::kGenerated);
  const grpc::Status attached = worker.Attach();
  ASSERT_TRUE(attached.ok()) << attached.error_message();
  const size_t reply_bytes = worker.attachment().ByteSizeLong();
  EXPECT_GT(reply_bytes, kMaxMessageBytes * 3 / 4);
  EXPECT_LE(reply_bytes, LargestMessageBytes(service_.engine().ListJobs()[0]->spec()));
}

TEST_F(MalformedInput, UnaryCallsNameWhatIsWrong) {
  CreateTinyJob(service_, "tiny");
  ExpectRefused(Create(TinyJob("tiny")), grpc::StatusCode::ALREADY_EXISTS, "the job again");

  const auto refuse = [&](grpc::StatusCode code, const std::string& what, const auto& call) {
    grpc::ClientContext context;
    ExpectRefused(call(&context), code, what);
  };
  using Code = grpc::StatusCode;
  for (const auto& [name, code] :
       {std::pair{"jobs/none", Code::NOT_FOUND}, std::pair{"tiny", Code::INVALID_ARGUMENT},
        std::pair{"", Code::INVALID_ARGUMENT}}) {
    refuse(code, std::string("GetJob ") + name, [&, name = name](grpc::ClientContext* context) {
      v1::GetJobRequest request;
      request.set_name(name);
      v1::Job response;
      return service_.jobs().GetJob(context, request, &response);
    });
    refuse(code, std::string("GetHistory ") + name, [&, name = name](grpc::ClientContext* context) {
      v1::GetHistoryRequest request;
      request.set_name(name);
      v1::JobHistory response;
      return service_.jobs().GetHistory(context, request, &response);
    });
    refuse(code, std::string("CloseJob ") + name, [&, name = name](grpc::ClientContext* context) {
      v1::CloseJobRequest request;
      request.set_name(name);
      v1::CloseJobResponse response;
      return service_.jobs().CloseJob(context, request, &response);
    });
    refuse(code, std::string("AbortStep ") + name, [&, name = name](grpc::ClientContext* context) {
      v1::AbortStepRequest request;
      request.set_name(name);
      v1::AbortStepResponse response;
      return service_.jobs().AbortStep(context, request, &response);
    });
    refuse(code, std::string("UndoStep ") + name, [&, name = name](grpc::ClientContext* context) {
      v1::UndoStepRequest request;
      request.set_name(name);
      v1::UndoStepResponse response;
      return service_.jobs().UndoStep(context, request, &response);
    });
  }
  const auto update = [&](const std::string& name, const v1::HyperParameters& changes) {
    return [&, name, changes](grpc::ClientContext* context) {
      v1::UpdateGroupRequest request;
      request.set_name(name);
      *request.mutable_changes() = changes;
      v1::ParamGroup response;
      return service_.jobs().UpdateGroup(context, request, &response);
    };
  };
  v1::HyperParameters negative, amsgrad;
  negative.set_lr(-1);
  amsgrad.set_amsgrad(true);
  refuse(Code::NOT_FOUND, "an unknown group", update("jobs/tiny/groups/x", {}));
  refuse(Code::INVALID_ARGUMENT, "a job as a group", update("jobs/tiny", {}));
  refuse(Code::INVALID_ARGUMENT, "a negative lr", update("jobs/tiny/groups/decay", negative));
  refuse(Code::INVALID_ARGUMENT, "amsgrad", update("jobs/tiny/groups/decay", amsgrad));

  const auto attach_over = [&](int members) {
    return [&, members](grpc::ClientContext* context) {
      v1::AttachWorkerRequest request;
      request.set_name("jobs/tiny");
      request.set_process_id("p");
      *request.mutable_job() = TinyJob("tiny");
      for (int i = 0; i < members; ++i) request.mutable_job()->add_members()->set_address("a:1");
      for (int i = 0; i < 2; ++i) request.mutable_job()->add_homes(i);
      v1::AttachWorkerResponse response;
      return service_.jobs().AttachWorker(context, request, &response);
    };
  };
  refuse(Code::FAILED_PRECONDITION, "members of a job without any", attach_over(2));
  refuse(Code::FAILED_PRECONDITION, "homes of a job without any", attach_over(0));

  const auto attach = [&](int rank, const std::string& uid, int64_t step, bool other_job) {
    return [&, rank, uid, step, other_job](grpc::ClientContext* context) {
      v1::AttachWorkerRequest request;
      request.set_name("jobs/tiny");
      request.set_rank(rank);
      request.set_process_id("p");
      request.set_uid(uid);
      if (step >= 0) request.set_expected_committed_step(step);
      if (other_job) {
        *request.mutable_job() = TinyJob("tiny");
        request.mutable_job()->mutable_parameters(0)->set_shape(0, 301);
      }
      v1::AttachWorkerResponse response;
      return service_.jobs().AttachWorker(context, request, &response);
    };
  };
  refuse(Code::INVALID_ARGUMENT, "rank 2 of 2", attach(2, "", -1, false));
  refuse(Code::INVALID_ARGUMENT, "rank -1", attach(-1, "", -1, false));
  refuse(Code::NOT_FOUND, "another uid", attach(0, "x", -1, false));
  refuse(Code::FAILED_PRECONDITION, "another step", attach(0, "", 4, false));
  refuse(Code::FAILED_PRECONDITION, "another layout", attach(0, "", -1, true));
  const auto reattach = [&](uint64_t generation) {
    return [&, generation](grpc::ClientContext* context) {
      v1::AttachWorkerRequest request;
      request.set_name("jobs/tiny");
      request.set_process_id("p");
      *request.mutable_generation() = proto::ToProto(Generation(generation));
      v1::AttachWorkerResponse response;
      return service_.jobs().AttachWorker(context, request, &response);
    };
  };
  refuse(Code::ABORTED, "an older generation", reattach(0));
  refuse(Code::ABORTED, "a generation to come", reattach(99));
}

// A reply repeats names: those of a job in each of its parameters, those of parameters in each rank
// and in each step. So they are looked at before a reply is measured, and errors quote a part.
TEST_F(MalformedInput, ALongNameIsRefusedBeforeItIsRepeated) {
  const std::string long_name(1 << 20, 'n');
  const auto refuse = [&](const std::string& whose, const std::function<void(v1::Job&)>& spoil) {
    v1::Job job = TinyJob("long");
    spoil(job);
    const grpc::Status created = Create(job);
    ExpectRefused(created, grpc::StatusCode::INVALID_ARGUMENT, whose);
    EXPECT_TRUE(Says(created.error_message()));
    EXPECT_LT(created.error_message().size(), 1000);
  };
  refuse("job name", [&](v1::Job& job) {
    job.set_name(long_name);
    for (int i = 0; i < 50; ++i) job.add_parameters()->set_name(std::to_string(i));
  });
  refuse("group name", [&](v1::Job& job) { job.mutable_groups(1)->set_name(long_name); });
  refuse("parameter 2", [&](v1::Job& job) { job.mutable_parameters(2)->set_name(long_name); });
  refuse("a dimension of the mesh", [&](v1::Job& job) {
    job.clear_partitions();
    job.add_mesh()->set_name(long_name);
  });
  refuse("group", [&](v1::Job& job) {
    job.mutable_groups(1)->set_name(long_name);
    job.mutable_groups(1)->clear_hyper_parameters();
  });
}

TEST_F(MalformedInput, AParameterOfManyDimensionsIsRefused) {
  v1::Job job = TinyJob("long");
  for (int i = 0; i < (1 << 20); ++i) job.mutable_parameters(1)->add_shape(1);
  const grpc::Status status = Create(job);
  ExpectRefused(status, grpc::StatusCode::INVALID_ARGUMENT, "a million dimensions");
  EXPECT_TRUE(Says(status.error_message()));
}

TEST_F(MalformedInput, NamesAsLongAsTheyMayBeAreTakenInFull) {
  const std::string name = "jobs/" + std::string(kMaxJobNameBytes, 'j');
  v1::Job job = TinyJob("long");
  job.set_name(name);
  for (v1::ParamGroup& group : *job.mutable_groups()) {
    const std::string bare =
        group.name() + std::string(kMaxGroupNameBytes - group.name().size(), 'g');
    group.set_name(name + "/groups/" + bare);
  }
  for (v1::Parameter& parameter : *job.mutable_parameters()) {
    const std::string bare =
        parameter.name() + std::string(kMaxParameterNameBytes - parameter.name().size(), 'p');
    parameter.set_name(name + "/parameters/" + bare);
  }
  const grpc::Status created = Create(job);
  EXPECT_TRUE(created.ok()) << created.error_message();
}

TEST_F(MalformedInput, AWorkerWithALongProcessIdIsRefusedBeforeItsRequestIsParsed) {
  CreateTinyJob(service_, "tiny");
  v1::AttachWorkerRequest request;
  request.set_name("jobs/tiny");
  request.set_process_id(std::string(1 << 20, 'p'));
  v1::AttachWorkerResponse response;
  grpc::ClientContext beside;
  const grpc::Status status = service_.jobs().AttachWorker(&beside, request, &response);
  ExpectRefused(status, grpc::StatusCode::INVALID_ARGUMENT, "a process of a MiB");
  EXPECT_TRUE(Says(status.error_message()));
}

// Sends one message, and expects no answer.
grpc::Status Ask(grpc::GenericStub& stub, const std::string& path, const std::string& bytes) {
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  const grpc::Slice slice(bytes);
  const auto call = stub.PrepareCall(&context, path, &queue);
  const auto next = [&] {
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    return ok;
  };
  call->StartCall(nullptr);
  next();
  call->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
  next();
  grpc::ByteBuffer answer;
  call->Read(&answer, nullptr);
  EXPECT_FALSE(next()) << path;
  grpc::Status status;
  call->Finish(&status, nullptr);
  next();
  return status;
}

// Of the three services that every server has.
std::vector<const google::protobuf::MethodDescriptor*> Methods() {
  std::vector<const google::protobuf::MethodDescriptor*> methods;
  for (const auto* file : {v1::Job::descriptor()->file(), v1::TrainRequest::descriptor()->file(),
                           v1::StateSummary::descriptor()->file()}) {
    const google::protobuf::ServiceDescriptor& service = *file->service(0);
    for (int m = 0; m < service.method_count(); ++m) methods.push_back(service.method(m));
  }
  return methods;
}

// Each method that takes one request gets bytes that are no message.
TEST_F(MalformedInput, BytesThatAreNoMessageAreRefusedByTheNameOfTheMessage) {
  grpc::GenericStub stub(service_.channel());
  int methods = 0;
  for (const google::protobuf::MethodDescriptor* method : Methods()) {
    if (method->client_streaming()) continue;
    ++methods;
    const std::string path = "/" + method->service()->full_name() + "/" + method->name();
    for (const std::string& bytes : {std::string("\xff\xff\xff"), std::string("\x0a\x7fx")}) {
      const grpc::Status status = Ask(stub, path, bytes);
      ExpectRefused(status, grpc::StatusCode::INVALID_ARGUMENT, path);
      EXPECT_THAT(status.error_message(), HasSubstr(method->input_type()->full_name()));
      EXPECT_EQ(ReasonOf(proto::FromGrpc(status)), reason::kMalformedMessage) << path;
    }
  }
  EXPECT_GE(methods, 18);
}

// Parsed, they would take a gigabyte of each 32 MiB.
TEST_F(MalformedInput, RequestsOfManyFieldsAreRefusedBeforeTheyAreParsed) {
  CreateTinyJob(service_, "tiny");
  std::string fields;
  for (int i = 0; i < (1 << 20); ++i) fields.append("\x7a\x00", 2);  // Of number 15, empty.
  const std::string name("\x0a\x09jobs/tiny");
  grpc::GenericStub stub(service_.channel());
  for (const google::protobuf::MethodDescriptor* method : Methods()) {
    // A description that is large has its room first.
    if (method->name() == "CreateJob") continue;
    const std::string path = "/" + method->service()->full_name() + "/" + method->name();
    const grpc::Status status =
        Ask(stub, path, method->client_streaming() ? fields : name + fields);
    ExpectRefused(status, grpc::StatusCode::INVALID_ARGUMENT, path);
    EXPECT_TRUE(Says(status.error_message())) << path;
  }
}

// Unknown fields of a description are counted with the rest of it.
TEST_F(MalformedInput, ADescriptionOfManyFieldsIsReadWhereThereIsRoomForThem) {
  grpc::GenericStub stub(service_.channel());
  v1::Job job = TinyJob("many");
  google::protobuf::UnknownFieldSet& unknown = *job.GetReflection()->MutableUnknownFields(&job);
  for (int i = 0; i < (1 << 21); ++i) unknown.AddLengthDelimited(15);
  v1::CreateJobRequest request;
  request.mutable_job()->Swap(&job);
  const grpc::Status status =
      Ask(stub, "/ballast.v1.JobService/CreateJob", request.SerializeAsString());
  ExpectRefused(status, grpc::StatusCode::RESOURCE_EXHAUSTED, "two million fields");
  EXPECT_TRUE(Says(status.error_message()));
  EXPECT_EQ(service_.engine().memory().used_bytes(), 0);
}

TEST_F(MalformedInput, StateCallsNameWhatIsWrong) {
  CreateTinyJob(service_, "tiny");
  using Code = grpc::StatusCode;
  const auto read = [&](const std::string& name, v1::Plane plane) {
    grpc::ClientContext context;
    v1::ReadStateRequest request;
    request.set_name(name);
    request.set_plane(plane);
    const auto reader = service_.state().ReadState(&context, request);
    v1::ReadStateResponse response;
    EXPECT_FALSE(reader->Read(&response));
    return reader->Finish();
  };
  ExpectRefused(read("jobs/tiny/parameters/x", v1::MASTER), Code::NOT_FOUND, "no parameter");
  ExpectRefused(read("jobs/x/parameters/w", v1::MASTER), Code::NOT_FOUND, "no job");
  ExpectRefused(read("w", v1::MASTER), Code::INVALID_ARGUMENT, "a bare name");
  ExpectRefused(read("jobs/tiny/parameters/w", v1::PLANE_UNSPECIFIED), Code::INVALID_ARGUMENT,
                "no plane");
  ExpectRefused(read("jobs/tiny/parameters/w", v1::MAX_EXP_AVG_SQ), Code::INVALID_ARGUMENT,
                "a plane of amsgrad");
  ExpectRefused(read("jobs/tiny/parameters/fixed", v1::MASTER), Code::INVALID_ARGUMENT, "frozen");
  {
    grpc::ClientContext context;
    v1::SummarizeStateRequest request;
    request.set_name("jobs/tiny/parameters/x");
    v1::StateSummary response;
    ExpectRefused(service_.state().SummarizeState(&context, request, &response), Code::NOT_FOUND,
                  "summary of no parameter");
  }
  {
    grpc::ClientContext context;
    v1::SaveJobRequest request;
    request.set_name("jobs/tiny");
    request.set_directory("relative/path");
    v1::SaveJobResponse response;
    ExpectRefused(service_.state().SaveJob(&context, request, &response), Code::INVALID_ARGUMENT,
                  "a relative directory");
  }
  {
    grpc::ClientContext context;
    v1::SaveJobRequest request;
    request.set_name("jobs/tiny");
    request.set_directory(std::string("/tmp/a\0b", 8));
    v1::SaveJobResponse response;
    ExpectRefused(service_.state().SaveJob(&context, request, &response), Code::INVALID_ARGUMENT,
                  "a directory that a file system would cut");
  }
  {
    grpc::ClientContext context;
    v1::LoadJobRequest request;
    request.set_name("jobs/tiny");
    request.set_directory("/nonexistent/checkpoint");
    v1::LoadJobResponse response;
    ExpectRefused(service_.state().LoadJob(&context, request, &response), Code::NOT_FOUND,
                  "no checkpoint");
  }
  const auto list = [&](const std::string& directory) {
    grpc::ClientContext context;
    v1::ListCheckpointsRequest request;
    request.set_directory(directory);
    v1::ListCheckpointsResponse response;
    return service_.state().ListCheckpoints(&context, request, &response);
  };
  const auto verify = [&](const std::string& directory) {
    grpc::ClientContext context;
    v1::VerifyCheckpointsRequest request;
    request.set_directory(directory);
    v1::ListCheckpointsResponse response;
    return service_.state().VerifyCheckpoints(&context, request, &response);
  };
  const auto remove = [&](const std::string& directory) {
    grpc::ClientContext context;
    v1::DeleteCheckpointRequest request;
    request.set_directory(directory);
    v1::DeleteCheckpointResponse response;
    return service_.state().DeleteCheckpoint(&context, request, &response);
  };
  for (const char* directory :
       {"", "..", "../step-1.1", "gpt/..", "gpt/../../step-1.1", "gpt/step-1.1/x", "gpt/latest",
        "/nonexistent", "/nonexistent/checkpoint", "/tmp/.."}) {
    ExpectRefused(remove(directory), Code::INVALID_ARGUMENT, "to delete what is no checkpoint");
  }
  ExpectRefused(remove("/nonexistent/step-1"), Code::NOT_FOUND, "to delete what is not there");
  ExpectRefused(remove("/nonexistent/step-1.1"), Code::NOT_FOUND, "to delete what is not there");
  ExpectRefused(list("../x"), Code::INVALID_ARGUMENT, "checkpoints in a path of dots");
  ExpectRefused(list("gpt/x"), Code::INVALID_ARGUMENT, "checkpoints below a name");
  ExpectRefused(list(""), Code::FAILED_PRECONDITION, "checkpoints of no directory");
  ExpectRefused(verify(""), Code::INVALID_ARGUMENT, "to verify nothing");
  ExpectRefused(verify("/nonexistent/checkpoint"), Code::NOT_FOUND, "to verify what is not there");
}

}  // namespace
}  // namespace ballast::server
