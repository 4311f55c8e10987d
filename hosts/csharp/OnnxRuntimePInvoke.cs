// The part of Microsoft.ML.OnnxRuntime that a host needs, by P/Invoke, for Mono and where the package is not
// available. Compile this file instead of referencing the package. It needs the /unsafe switch and C# 7.
//
// Names and semantics are those of the package. ONNX Runtime's C API is a table of functions that only grows at its
// end, so the index of a function (struct OrtApi of onnxruntime_c_api.h) never changes.
//
// The library is the file SPECEDGE_ONNXRUNTIME, else `onnxruntime` in the system's search path.
using System;
using System.Buffers;
using System.Collections.Concurrent;
using System.Collections.Generic;
using System.Linq;
using System.Runtime.InteropServices;
using System.Text;
using Microsoft.ML.OnnxRuntime.Tensors;

namespace Microsoft.ML.OnnxRuntime.Tensors
{
    public enum TensorElementType { Float = 1, Int64 = 7, String = 8, Bool = 9, Double = 11 }
}

namespace Microsoft.ML.OnnxRuntime
{
    public enum OrtLoggingLevel { ORT_LOGGING_LEVEL_WARNING = 2, ORT_LOGGING_LEVEL_ERROR = 3 }

    public sealed class OnnxRuntimeException : Exception
    {
        internal OnnxRuntimeException(string message) : base(message) { }
    }

    /// <summary>Indices of functions in struct OrtApi.</summary>
    internal enum Place
    {
        GetErrorMessage = 2, CreateEnv = 3, CreateSession = 7, Run = 9, CreateSessionOptions = 10,
        SetSessionLogSeverityLevel = 22, CreateRunOptions = 39, CreateTensorAsOrtValue = 48,
        CreateTensorWithDataAsOrtValue = 49, GetTensorMutableData = 51, GetTensorShapeElementCount = 64,
        GetTensorTypeAndShape = 65, CreateCpuMemoryInfo = 69, GetAllocatorWithDefaultOptions = 78,
        ReleaseStatus = 93, ReleaseSession = 95, ReleaseValue = 96, ReleaseRunOptions = 97,
        ReleaseTensorTypeAndShapeInfo = 99, ReleaseSessionOptions = 100,
        GetStringTensorElementLength = 127, GetStringTensorElement = 128, FillStringTensorElement = 129,
        AddSessionConfigEntry = 130, RunWithBinding = 133, CreateIoBinding = 134, ReleaseIoBinding = 135,
        BindInput = 136, BindOutput = 137, RegisterCustomOpsLibrary_V2 = 228,
    }

    /// <summary>Table of functions.</summary>
    internal static class Native
    {
        private const uint Api = 17;  // the table of ONNX Runtime 1.17 has all functions used here

        internal delegate IntPtr GetBase();
        internal delegate IntPtr GetApi(uint version);
        internal delegate IntPtr GetText(IntPtr status);
        internal delegate void Release(IntPtr thing);
        internal delegate IntPtr Create(out IntPtr made);
        internal delegate IntPtr CreateEnv(int level, string name, out IntPtr made);
        internal delegate IntPtr CreateMemory(int allocator, int type, out IntPtr made);
        internal delegate IntPtr CreateSession(IntPtr env, byte[] path, IntPtr options, out IntPtr made);
        internal delegate IntPtr CreateTensor(IntPtr allocator, long[] shape, UIntPtr rank, int type, out IntPtr made);
        internal delegate IntPtr CreateOver(
            IntPtr memory, IntPtr data, UIntPtr size, long[] shape, UIntPtr rank, int type, out IntPtr made);
        internal delegate IntPtr Get(IntPtr from, out IntPtr found);
        internal delegate IntPtr GetLength(IntPtr tensor, UIntPtr index, out UIntPtr length);
        internal delegate IntPtr GetElement(IntPtr tensor, UIntPtr size, UIntPtr index, [Out] byte[] text);
        internal delegate IntPtr SetElement(IntPtr tensor, byte[] text, UIntPtr index);
        internal delegate IntPtr SetNumber(IntPtr options, int value);
        internal delegate IntPtr SetPath(IntPtr options, byte[] path);
        internal delegate IntPtr SetTexts(IntPtr options, string key, string value);
        internal delegate IntPtr Bind(IntPtr binding, string name, IntPtr value);
        internal delegate IntPtr RunBound(IntPtr session, IntPtr options, IntPtr binding);
        internal delegate IntPtr RunNamed(
            IntPtr session, IntPtr options, string[] inputNames, IntPtr[] inputs, UIntPtr numInputs,
            string[] outputNames, UIntPtr numOutputs, [In, Out] IntPtr[] outputs);

        internal static readonly bool IsWindows = System.IO.Path.DirectorySeparatorChar == '\\';
        internal static readonly string Version;
        private static readonly ConcurrentDictionary<Place, Delegate> Found = new ConcurrentDictionary<Place, Delegate>();
        private static readonly IntPtr Table;

        static Native()
        {
            IntPtr found = Base();
            Table = Function<GetApi>(Marshal.ReadIntPtr(found))(Api);
            Version = Marshal.PtrToStringAnsi(Function<GetBase>(Marshal.ReadIntPtr(found, IntPtr.Size))());
            if (Table == IntPtr.Zero)
                throw new NotSupportedException($"ONNX Runtime {Version} is older than 1.{Api}");
        }

        /// <summary>Returns the function at an index of the table.</summary>
        internal static T At<T>(Place place) => (T)(object)Found.GetOrAdd(
            place, at => (Delegate)(object)Function<T>(Marshal.ReadIntPtr(Table, (int)at * IntPtr.Size)));

        internal static void Check(IntPtr status)
        {
            if (status == IntPtr.Zero)
                return;
            string message = Marshal.PtrToStringAnsi(At<GetText>(Place.GetErrorMessage)(status));
            At<Release>(Place.ReleaseStatus)(status);
            throw new OnnxRuntimeException(message);
        }

        /// <summary>Encodes a path: UTF-16 on Windows, else UTF-8.</summary>
        internal static byte[] Path(string path) => (IsWindows ? Encoding.Unicode : Encoding.UTF8).GetBytes(path + "\0");

        private static IntPtr Base()
        {
            string path = Environment.GetEnvironmentVariable("SPECEDGE_ONNXRUNTIME");
            if (string.IsNullOrEmpty(path) || IsWindows)
                return OrtGetApiBase();
            IntPtr library = Load(path, 2);  // RTLD_NOW
            if (library == IntPtr.Zero)
                throw new DllNotFoundException($"SPECEDGE_ONNXRUNTIME is {path}, which cannot be loaded");
            return Function<GetBase>(Symbol(library, "OrtGetApiBase"))();
        }

        private static T Function<T>(IntPtr address) => Marshal.GetDelegateForFunctionPointer<T>(address);

        [DllImport("onnxruntime")] private static extern IntPtr OrtGetApiBase();
        [DllImport("libdl.so.2", EntryPoint = "dlopen")] private static extern IntPtr Load(string path, int how);
        [DllImport("libdl.so.2", EntryPoint = "dlsym")] private static extern IntPtr Symbol(IntPtr library, string name);
    }

    /// <summary>A native object, released once, at the latest by the garbage collector.</summary>
    public abstract class NativeThing : SafeHandle
    {
        private readonly Native.Release _release;

        internal NativeThing(Place release) : base(IntPtr.Zero, true) => _release = Native.At<Native.Release>(release);

        public override bool IsInvalid => handle == IntPtr.Zero;

        internal IntPtr Pointer => IsClosed ? throw new ObjectDisposedException(GetType().Name) : handle;

        protected override bool ReleaseHandle()
        {
            _release(handle);
            return true;
        }
    }

    /// <summary>Lives as long as the process.</summary>
    public sealed class OrtEnv
    {
        private static readonly OrtEnv One = new OrtEnv();
        internal readonly IntPtr Pointer;

        private OrtEnv() => Native.Check(Native.At<Native.CreateEnv>(Place.CreateEnv)(
            (int)OrtLoggingLevel.ORT_LOGGING_LEVEL_WARNING, "csharp", out Pointer));

        public static OrtEnv Instance() => One;

        public string GetVersionString() => Native.Version;
    }

    /// <summary>Lives as long as the process.</summary>
    public sealed class OrtAllocator
    {
        internal readonly IntPtr Pointer;

        private OrtAllocator() =>
            Native.Check(Native.At<Native.Create>(Place.GetAllocatorWithDefaultOptions)(out Pointer));

        public static OrtAllocator DefaultInstance { get; } = new OrtAllocator();
    }

    /// <summary>Lives as long as the process.</summary>
    public sealed class OrtMemoryInfo
    {
        internal readonly IntPtr Pointer;

        private OrtMemoryInfo() =>
            Native.Check(Native.At<Native.CreateMemory>(Place.CreateCpuMemoryInfo)(0, 0, out Pointer));

        public static OrtMemoryInfo DefaultInstance { get; } = new OrtMemoryInfo();
    }

    public sealed class SessionOptions : NativeThing
    {
        public SessionOptions() : base(Place.ReleaseSessionOptions) =>
            Native.Check(Native.At<Native.Create>(Place.CreateSessionOptions)(out handle));

        public OrtLoggingLevel LogSeverityLevel
        {
            set => Native.Check(Native.At<Native.SetNumber>(Place.SetSessionLogSeverityLevel)(Pointer, (int)value));
        }

        public void AddSessionConfigEntry(string key, string value) =>
            Native.Check(Native.At<Native.SetTexts>(Place.AddSessionConfigEntry)(Pointer, key, value));

        public void RegisterCustomOpLibrary(string path) =>
            Native.Check(Native.At<Native.SetPath>(Place.RegisterCustomOpsLibrary_V2)(Pointer, Native.Path(path)));

        public void RegisterOrtExtensions() =>
            RegisterCustomOpLibrary(Native.IsWindows ? "ortextensions.dll" : "libortextensions.so");
    }

    public sealed class RunOptions : NativeThing
    {
        public RunOptions() : base(Place.ReleaseRunOptions) =>
            Native.Check(Native.At<Native.Create>(Place.CreateRunOptions)(out handle));
    }

    /// <summary>A tensor in native memory, or over pinned managed memory.</summary>
    public sealed unsafe class OrtValue : NativeThing
    {
        private static readonly Dictionary<Type, TensorElementType> Types = new Dictionary<Type, TensorElementType>
        {
            [typeof(float)] = TensorElementType.Float, [typeof(double)] = TensorElementType.Double,
            [typeof(long)] = TensorElementType.Int64, [typeof(bool)] = TensorElementType.Bool,
        };

        private MemoryHandle _pinned;

        internal OrtValue(IntPtr value) : base(Place.ReleaseValue) => handle = value;

        public static OrtValue CreateAllocatedTensorValue(OrtAllocator allocator, TensorElementType type, long[] shape)
        {
            Native.Check(Native.At<Native.CreateTensor>(Place.CreateTensorAsOrtValue)(
                allocator.Pointer, shape, (UIntPtr)shape.Length, (int)type, out IntPtr made));
            return new OrtValue(made);
        }

        public static OrtValue CreateTensorWithEmptyStrings(OrtAllocator allocator, long[] shape) =>
            CreateAllocatedTensorValue(allocator, TensorElementType.String, shape);

        public static OrtValue CreateTensorValueFromMemory<T>(T[] memory, long[] shape) where T : struct =>
            CreateTensorValueFromMemory(OrtMemoryInfo.DefaultInstance, new Memory<T>(memory), shape);

        public static OrtValue CreateTensorValueFromMemory<T>(OrtMemoryInfo place, Memory<T> memory, long[] shape)
            where T : struct
        {
            if (!Types.TryGetValue(typeof(T), out TensorElementType type))
                throw new NotSupportedException($"unsupported tensor type {typeof(T)}");
            int size = type == TensorElementType.Bool ? 1 : type == TensorElementType.Float ? 4 : 8;
            MemoryHandle pinned = memory.Pin();
            IntPtr status = Native.At<Native.CreateOver>(Place.CreateTensorWithDataAsOrtValue)(
                place.Pointer, (IntPtr)pinned.Pointer, (UIntPtr)((ulong)memory.Length * (ulong)size),
                shape, (UIntPtr)shape.Length, (int)type, out IntPtr made);
            if (status != IntPtr.Zero)
                pinned.Dispose();
            Native.Check(status);
            return new OrtValue(made) { _pinned = pinned };
        }

        public ReadOnlySpan<T> GetTensorDataAsSpan<T>() where T : struct => GetTensorMutableDataAsSpan<T>();

        public Span<T> GetTensorMutableDataAsSpan<T>() where T : struct
        {
            Native.Check(Native.At<Native.Get>(Place.GetTensorMutableData)(Pointer, out IntPtr data));
            Native.Check(Native.At<Native.Get>(Place.GetTensorTypeAndShape)(Pointer, out IntPtr shape));
            IntPtr status = Native.At<Native.Get>(Place.GetTensorShapeElementCount)(shape, out IntPtr length);
            Native.At<Native.Release>(Place.ReleaseTensorTypeAndShapeInfo)(shape);
            Native.Check(status);
            return new Span<T>(data.ToPointer(), (int)length);
        }

        public void StringTensorSetElementAt(ReadOnlySpan<byte> utf8, int index)
        {
            byte[] text = utf8.ToArray();
            Array.Resize(ref text, text.Length + 1);
            Native.Check(Native.At<Native.SetElement>(Place.FillStringTensorElement)(Pointer, text, (UIntPtr)index));
        }

        public ReadOnlySpan<byte> GetStringElementAsSpan(int index)
        {
            Native.Check(Native.At<Native.GetLength>(Place.GetStringTensorElementLength)(Pointer, (UIntPtr)index, out UIntPtr length));
            var text = new byte[(int)length];
            Native.Check(Native.At<Native.GetElement>(Place.GetStringTensorElement)(Pointer, length, (UIntPtr)index, text));
            return new ReadOnlySpan<byte>(text);
        }

        protected override bool ReleaseHandle()
        {
            base.ReleaseHandle();
            _pinned.Dispose();
            return true;
        }
    }

    public sealed class OrtIoBinding : NativeThing
    {
        internal OrtIoBinding(IntPtr session) : base(Place.ReleaseIoBinding) =>
            Native.Check(Native.At<Native.Get>(Place.CreateIoBinding)(session, out handle));

        public void BindInput(string name, OrtValue value) =>
            Native.Check(Native.At<Native.Bind>(Place.BindInput)(Pointer, name, value.Pointer));

        public void BindOutput(string name, OrtValue value) =>
            Native.Check(Native.At<Native.Bind>(Place.BindOutput)(Pointer, name, value.Pointer));
    }

    public sealed class InferenceSession : NativeThing
    {
        public InferenceSession(string path, SessionOptions options) : base(Place.ReleaseSession) =>
            Native.Check(Native.At<Native.CreateSession>(Place.CreateSession)(
                OrtEnv.Instance().Pointer, Native.Path(path), options.Pointer, out handle));

        public OrtIoBinding CreateIoBinding() => new OrtIoBinding(Pointer);

        public void RunWithBinding(RunOptions options, OrtIoBinding binding) =>
            Native.Check(Native.At<Native.RunBound>(Place.RunWithBinding)(Pointer, options.Pointer, binding.Pointer));

        public OutputValues Run(
            RunOptions options, IReadOnlyDictionary<string, OrtValue> inputs, IReadOnlyCollection<string> outputNames)
        {
            IntPtr[] values = inputs.Values.Select(value => value.Pointer).ToArray();
            var outputs = new IntPtr[outputNames.Count];
            Native.Check(Native.At<Native.RunNamed>(Place.Run)(
                Pointer, options.Pointer, inputs.Keys.ToArray(), values, (UIntPtr)values.Length,
                outputNames.ToArray(), (UIntPtr)outputs.Length, outputs));
            return new OutputValues(outputs.Select(value => new OrtValue(value)).ToList());
        }
    }

    public sealed class OutputValues : IDisposable
    {
        private readonly List<OrtValue> _values;

        internal OutputValues(List<OrtValue> values) => _values = values;

        public OrtValue this[int index] => _values[index];

        public void Dispose() => _values.ForEach(value => value.Dispose());
    }
}
